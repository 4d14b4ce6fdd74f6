"""What a warp does in a product by a bitmap, in PTX: the sums of its turns.

Triton has no operands of tensor cores that a thread puts together value by value. A lane owns eight places of a tile,
those of operand A of `mma.m16n8k16`. A bit says whether a place is stored; then the next of the lane's values, which
follow each other through the tiles of a turn, is loaded from shared memory, where bulk copies bring whole turns, some
turns ahead: a ring a warp. A chunk's values are copied from a multiple of 16 bytes on, with a few of its neighbours'.
Columns of x follow the places, so that a lane loads eight neighbours.

A place takes four instructions: its bit, the load, the way to the next value, and halves of two that pair values.
Where two neighbours share a bit, they take three.
"""

from triton.experimental import gluon

from sparsecomp.formats.lanes import CHUNK, LANES, TILES, UNIT


@gluon.constexpr_function
def ring_bytes(warps, depth, strips, slot):
    """Shared memory of the rings of all warps, and of a barrier for each turn in them."""
    return warps * depth * (strips * slot + 8)


@gluon.constexpr_function
def walk(dtype, index, grain, head, warps, weights, depth, strips, halves, slot, whole):
    """PTX of the sums of a warp's turns; NaN where a chunk has no room in its slot.

    Operands: 4 · strips · halves sums; then, in as many copies each, starts, heads, values, x (addresses), the first
    strip, the last there is, turns, columns and rows of x. The rings begin where shared memory does.

    Args:
        index: dtype of starts, int32 or int64.
        grain: neighbours in a row that share a bit, 1 or 2.
        head: bytes of a chunk's head.
        weights: that the warps of a program divide among them, one a group of neighbouring warps.
        depth: turns in a ring.
        strips: of sixteen rows, next to each other.
        halves: of sixteen rows of x.
        slot: bytes of shared memory for a strip's chunk.
        whole: whether each turn has all its columns.
    """
    sums, group = 4 * strips * halves, warps // weights
    starts, heads, values, x, first, last, turns, columns, rows = (f"${sums * (1 + place)}" for place in range(9))
    lines = [
        "{",
        ".reg .pred p<8>, load<2>, more, leader, done, there, some, long;",
        ".reg .b32 lane, quad, row, warp, turn, ahead, place, phase, bar, ring, sub, col, which, t, u;",
        f".reg .b{_width(index)} begin<{depth * strips}>, end<{depth * strips}>;",
        f".reg .b32 size<{strips}>;",
        f".reg .b32 line<{strips}>, next<{strips}>, mask<{2 * strips}>;",
        ".reg .b32 s<8>, a<8>, h<8>, b<8>;",
        ".reg .b64 at<2>, row_at<2>, w;",
        f".reg .f32 c<{sums}>;",
        "mov.u32 t, %tid.x; and.b32 lane, t, 31; shr.u32 warp, t, 5; and.b32 quad, lane, 3; shr.u32 row, lane, 2;",
        f"mov.u32 ring, global_smem; add.u32 bar, ring, {warps * depth * strips * slot};",
        f"mad.lo.u32 ring, warp, {depth * strips * slot}, ring; mad.lo.u32 bar, warp, {8 * depth}, bar;",
        "setp.eq.u32 leader, lane, 0; setp.ne.u32 long, lane, lane;",
        *(f"@leader mbarrier.init.shared::cta.b64 [bar+{8 * number}], 1;" for number in range(depth)),
        "@leader fence.mbarrier_init.release.cluster;",
        "@leader fence.proxy.async.shared::cta;",
        "bar.warp.sync -1;",
        *(f"mov.f32 c{number}, 0f00000000;" for number in range(sums)),
    ]
    for half in range(halves):
        lines += [
            f"add.u32 t, row, {8 * half}; setp.lt.u32 load{half}, t, {rows};",
            f"mul.wide.u32 w, t, {columns}; shl.b64 w, w, 1; add.s64 row_at{half}, {x}, w;",
            f"mul.wide.u32 w, quad, 16; add.s64 row_at{half}, row_at{half}, w;",
        ]
    for strip in range(strips):
        lines += [f"add.u32 t, {first}, {strip}; min.u32 t, t, {last}; mul.lo.u32 line{strip}, t, {turns};"]
    lines += [f"and.b32 turn, warp, {group - 1}; mov.u32 ahead, turn;"]
    for number in range(depth):
        lines += _look_ahead(starts, index, turns, group, strips, number)
    for number in range(depth):
        lines += [
            f"add.u32 which, turn, {number * group}; setp.lt.u32 more, which, {turns};",
            f"add.u32 sub, ring, {number * strips * slot}; add.u32 u, bar, {8 * number};",
            *_copy(heads, values, index, head, strips, slot, number, number),
        ]
    lines += [
        *_look_ahead(starts, index, turns, group, strips, 0),
        "mov.u32 place, 0; mov.u32 phase, 0;",
        "TURN:",
        f"setp.ge.u32 done, turn, {turns};",
        "@done bra.uni DONE;",
        "shl.b32 u, place, 3; add.u32 u, u, bar;",
        "WAIT:",
        "mbarrier.try_wait.parity.shared::cta.b64 done, [u], phase;",
        "@!done bra WAIT;",
        f"mad.lo.u32 sub, place, {strips * slot}, ring;",
        f"mul.lo.u32 col, turn, {CHUNK}; mul.wide.u32 w, col, 2; mad.lo.u32 col, quad, 8, col;",
        *(f"add.s64 at{half}, row_at{half}, w;" for half in range(halves)),
        *(line for strip in range(strips) for line in _open(grain, head, strip, slot)),
        *(line for pair in range(TILES // 2) for line in _pair(dtype, grain, pair, strips, halves, columns, whole)),
        "bar.warp.sync -1;",
        f"shl.b32 u, place, 3; add.u32 u, u, bar; sub.u32 which, ahead, {group};",
        *_copy(heads, values, index, head, strips, slot, 0, "_AGAIN"),
        *_look_ahead(starts, index, turns, group, strips, 0),
        f"add.u32 turn, turn, {group}; add.u32 place, place, 1;",
        f"setp.eq.u32 done, place, {depth}; @done mov.u32 place, 0; @done xor.b32 phase, phase, 1;",
        "bra.uni TURN;",
        "DONE:",
        "bar.sync 0;",  # what comes behind may write where another warp still reads
        *(f"@long mov.f32 c{number}, 0f7fc00000;" for number in range(sums)),
        *(f"mov.f32 ${number}, c{number};" for number in range(sums)),
        "}",
    ]
    return "\n".join(lines)


@gluon.constexpr_function
def _width(index):
    """Bits of where a chunk begins."""
    return {"int32": 32, "int64": 64}[index]


@gluon.constexpr_function
def _look_ahead(starts, index, turns, group, strips, number):
    """Where the chunks of the turn `ahead` begin and end, if there is such a turn (`more`)."""
    load, size = f"@more ld.global.nc.u{_width(index)}", _width(index) // 8
    lines = [f"setp.lt.u32 more, ahead, {turns};"]
    for strip in range(strips):
        one = number * strips + strip
        lines += [
            f"add.u32 t, line{strip}, ahead; mul.wide.u32 w, t, {size}; add.s64 w, w, {starts};",
            f"{load} begin{one}, [w]; {load} end{one}, [w+{size}];",
        ]
    return [*lines, f"add.u32 ahead, ahead, {group};"]


@gluon.constexpr_function
def _copy(heads, values, index, head, strips, slot, number, label):
    """Bring the chunks of the turn `which` to the place `sub` of the ring, whose barrier is at `u`; of one that is too
    long what has room."""
    width, room, brought = _width(index), slot - head, f"BROUGHT{label}"
    lines = [f"mov.u32 t, {strips * head};"]
    for strip in range(strips):
        begin, end, size = f"begin{number * strips + strip}", f"end{number * strips + strip}", f"size{strip}"
        lines += [
            f"and.b{width} {begin}, {begin}, {-UNIT}; add.u{width} {end}, {end}, {UNIT - 1};",
            f"and.b{width} {end}, {end}, {-UNIT}; sub.u{width} {end}, {end}, {begin};",
            f"cvt.u32.u{width} {size}, {end}; shl.b32 {size}, {size}, 1;",
            f"setp.gt.and.u32 some, {size}, {room}, more; or.pred long, long, some;",
            f"min.u32 {size}, {size}, {room}; add.u32 t, t, {size};",
        ]
    # a lane that the hardware elects needs no turn for each address that the others might have
    lines += ["elect.sync _|leader, -1; and.pred leader, leader, more;", f"@!leader bra {brought};"]
    lines += ["mbarrier.arrive.expect_tx.shared::cta.b64 _, [u], t;"]
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [t], [w]"
    for strip in range(strips):
        lines += [
            f"add.u32 t, line{strip}, which; mul.wide.u32 w, t, {head}; add.s64 w, w, {heads};",
            f"add.u32 t, sub, {strip * slot};",
            f"{copy}, {head}, [u];",
            f"cvt.u64.u{width} w, begin{number * strips + strip}; shl.b64 w, w, 1; add.s64 w, w, {values};",
            f"add.u32 t, t, {head};",
            f"setp.ne.u32 some, size{strip}, 0;",
            f"@some {copy}, size{strip}, [u];",
        ]
    return [*lines, f"{brought}:"]


@gluon.constexpr_function
def _open(grain, head, strip, slot):
    """The bits of a lane's places of a strip, none of which is left where a chunk was too long, and where its first
    value lies."""
    at = strip * slot
    vector, words = {1: (".v2", [f"mask{2 * strip}", f"mask{2 * strip + 1}"]), 2: ("", [f"mask{2 * strip}"])}[grain]
    loaded = f"{{{', '.join(words)}}}" if vector else words[0]
    return [
        f"mad.lo.u32 t, lane, {TILES // grain}, sub;",
        f"ld.shared{vector}.b32 {loaded}, [t+{at + 2 * LANES}];",
        *(f"@long mov.b32 {word}, 0;" for word in words),
        f"mad.lo.u32 t, lane, 2, sub; ld.shared.u16 t, [t+{at}];",
        f"mad.lo.u32 next{strip}, t, 2, sub;",
        f"add.u32 next{strip}, next{strip}, {at + head};",
    ]


@gluon.constexpr_function
def _pair(dtype, grain, pair, strips, halves, columns, whole):
    """Two tiles of each strip, by eight neighbouring columns of x a lane."""
    lines = []
    for half in range(halves):
        four = [f"b{4 * half + register}" for register in range(4)]
        lines += [f"mov.b32 {register}, 0;" for register in four]
        there = f"load{half}"
        if not whole:
            lines += [f"add.u32 t, col, {32 * pair}; setp.lt.and.u32 there, t, {columns}, load{half};"]
            there = "there"
        lines += [f"@{there} ld.global.nc.v4.b32 {{{', '.join(four)}}}, [at{half}+{64 * pair}];"]
    for strip in range(strips):
        for odd in range(2):
            decode = _decode if grain == 1 else _decode_twos
            lines += decode(strip, 2 * pair + odd, 4 * odd)
            lines += _multiply(dtype, strip, halves, odd)
    return lines


@gluon.constexpr_function
def _decode(strip, tile, side):
    """Registers `side` to side + 3 of `a`: rows g and g + 8 of two columns, then of two more; 0 where nothing is
    stored."""
    four = range(side, side + 4)
    lines = [f"mov.b32 a{register}, 0; mov.b32 h{register}, 0;" for register in four]
    for bit in range(8):
        place = 8 * (tile % 4) + bit  # of the word
        # the bit is moved to where it is two, the bytes of a value
        shift = f"shr.u32 s{bit}, s{bit}, {place - 1};" if place > 0 else f"shl.b32 s{bit}, s{bit}, 1;"
        lines += [
            f"and.b32 s{bit}, mask{2 * strip + tile // 4}, {1 << place}; setp.ne.u32 p{bit}, s{bit}, 0;",
            f"@p{bit} ld.shared.u16 {'ah'[bit % 2]}{side + bit // 2}, [next{strip}];",
            f"{shift} add.u32 next{strip}, next{strip}, s{bit};",
        ]
    return lines + [f"prmt.b32 a{register}, a{register}, h{register}, 0x5410;" for register in four]


@gluon.constexpr_function
def _decode_twos(strip, tile, side):
    """As `_decode`; a bit is a register."""
    lines = []
    for bit in range(4):
        place = 4 * tile + bit  # of the word
        # the bit is moved to where it is four, the bytes of two values
        shift = f"shr.u32 s{bit}, s{bit}, {place - 2};" if place > 1 else f"shl.b32 s{bit}, s{bit}, {2 - place};"
        lines += [
            f"mov.b32 a{side + bit}, 0;",
            f"and.b32 s{bit}, mask{2 * strip}, {1 << place}; setp.ne.u32 p{bit}, s{bit}, 0;",
            f"@p{bit} ld.shared.b32 a{side + bit}, [next{strip}];",
            f"{shift} add.u32 next{strip}, next{strip}, s{bit};",
        ]
    return lines


@gluon.constexpr_function
def _multiply(dtype, strip, halves, odd):
    """Add the products of a tile."""
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    a = ", ".join(f"a{4 * odd + register}" for register in range(4))
    lines = []
    for half in range(halves):
        c = ", ".join(f"c{4 * (strip * halves + half) + register}" for register in range(4))
        b = f"b{4 * half + 2 * odd}, b{4 * half + 2 * odd + 1}"
        lines += [f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{c}}}, {{{a}}}, {{{b}}}, {{{c}}};"]
    return lines


WALK = (walk, ring_bytes, _width, _look_ahead, _copy, _open, _pair, _decode, _decode_twos, _multiply)
"""What it is made of."""
