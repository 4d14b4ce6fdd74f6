"""The trial on which a layer's implementations are measured: spikes of the site's density, in its share of pixels."""

import pytest
import torch

from sparsecomp.lowering.spiking.implementations import SPIKE_CONV, SiteInfo
from sparsecomp.reference.geometry import Window

SITE = SiteInfo(
    device="cuda", itemsize=4, n=4, c=16, size=(64, 64), k=16, window=Window.centred((3, 3), (1, 1)), groups=1,
    digits=3, density=0.5, active=None, tf32=False, channels_last=True, fused=True,
)  # fmt: skip


def spikes(site: SiteInfo) -> torch.Tensor:
    operands = SPIKE_CONV.operands(site, torch.device("cpu"), 0)
    assert torch.equal(operands[0], operands[1].float())
    return operands[0]


@pytest.mark.parametrize("density", [0.02, 0.5])
def test_spikes_have_the_sites_density(density):
    assert spikes(SITE._replace(density=density)).mean().item() == pytest.approx(density, rel=0.05)


@pytest.mark.parametrize("active", [0.1, 0.6])
def test_blocks_of_eight_pixels_are_idle_but_for_the_active_share(active):
    x = spikes(SITE._replace(active=active, n=32))
    blocks = x.amax(1).unfold(1, 8, 8).unfold(2, 8, 8).amax((-1, -2))
    assert blocks.mean().item() == pytest.approx(active, abs=0.03)


@pytest.mark.parametrize("active", [None, 1.0])
def test_no_pixel_is_idle_where_all_are_active_or_nothing_is_known(active):
    assert spikes(SITE._replace(active=active, density=0.9)).amax(1).min() == 1


@pytest.mark.parametrize(
    ("change", "tolerance"),
    [({}, 2e-6), ({"digits": 4}, 2e-6), ({"digits": 2}, 2e-3), ({"tf32": True}, 2e-3), ({"itemsize": 2}, 2e-3)],
)
def test_a_trial_is_as_exact_as_the_least_exact_of_its_candidates(change, tolerance):
    """TF32, a half and two bytes round to some 2^-11 to 2^-15; three bytes and more to float32's precision."""
    assert SPIKE_CONV.tolerance(SITE._replace(**change)) == tolerance
