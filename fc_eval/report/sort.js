// Click a heading to sort by it, again to turn the order; the baseline stays on top.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const th = button.parentElement, body = th.closest("table").tBodies[0];
    const column = [...th.parentElement.children].indexOf(th);
    const up = th.getAttribute("aria-sort") !== "ascending";
    for (const other of th.parentElement.children) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", up ? "ascending" : "descending");
    const words = th.classList.contains("w");
    const key = (row) => {
      const cell = row.cells[column];
      return words ? cell.textContent : "v" in cell.dataset ? Number(cell.dataset.v) : NaN;
    };
    const order = (a, b) => {
      const x = key(a), y = key(b);
      if (words) return up ? x.localeCompare(y) : y.localeCompare(x);
      if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y); // cells without a number come last either way
      return up ? x - y : y - x;
    };
    const rows = [...body.rows].filter((row) => !row.classList.contains("pinned"));
    body.append(...rows.sort(order));
  });
}
