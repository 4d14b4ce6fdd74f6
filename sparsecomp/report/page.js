"use strict";
(() => {
  const table = document.getElementById("layers");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const text = document.getElementById("filter");
  const outcome = document.getElementById("outcome");

  function filter() {
    const wanted = text.value.trim().toLowerCase();
    for (const row of rows) {
      const fits = row.textContent.toLowerCase().includes(wanted);
      row.hidden = !fits || (outcome.value !== "" && !row.classList.contains(outcome.value));
    }
    const shown = rows.filter((row) => !row.hidden).length;
    document.getElementById("count").textContent = `${shown} of ${rows.length} layers`;
  }

  function sort(index) {
    const headings = [...table.tHead.rows[0].cells];
    const descending = headings[index].getAttribute("aria-sort") === "ascending";
    for (const heading of headings) heading.setAttribute("aria-sort", "none");
    headings[index].setAttribute("aria-sort", descending ? "descending" : "ascending");
    const number = (row) => row.cells[index].dataset.number;
    const words = (row) => row.cells[index].textContent;
    // by numbers where the column has any; cells without one come last, whichever way
    const numbered = rows.filter((row) => number(row) !== undefined);
    const rest = numbered.length ? rows.filter((row) => number(row) === undefined) : [];
    const sorted = numbered.length
      ? numbered.sort((a, b) => number(a) - number(b))
      : [...rows].sort((a, b) => words(a).localeCompare(words(b), undefined, { numeric: true }));
    body.append(...(descending ? sorted.reverse() : sorted), ...rest);
  }

  text.addEventListener("input", filter);
  outcome.addEventListener("change", filter);
  [...table.tHead.rows[0].cells].forEach((heading, index) => {
    heading.firstElementChild.addEventListener("click", () => sort(index));
  });
  filter();
})();
