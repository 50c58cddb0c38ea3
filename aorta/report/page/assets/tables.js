// Tables that sort by a column, and selects that choose rows. Without this script they are still whole.

function sortValue(cell, numeric) {
  const told = cell.dataset.sort;
  if (told === undefined || told === "") return null;
  return numeric ? Number(told) : told;
}

function sortBy(table, place, up) {
  const heads = [...table.tHead.rows[0].cells];
  const numeric = heads[place].dataset.numeric === "true";
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => [sortValue(row.cells[place], numeric), row]);
  rows.sort(([left], [right]) => {
    if (left === null || right === null) return (left === null) - (right === null); // unknown stays last
    const order = numeric ? left - right : left.localeCompare(right, undefined, { numeric: true });
    return up ? order : -order;
  });
  body.append(...rows.map(([, row]) => row));
  const box = table.closest("[data-first]");
  if (box) showFirst(box);
  heads.forEach((head, at) => {
    if (at === place) head.setAttribute("aria-sort", up ? "ascending" : "descending");
    else head.removeAttribute("aria-sort");
  });
}

// Of a long table the first rows in the order that it has; a button shows the others.
function showFirst(box) {
  const rows = [...box.querySelectorAll("tbody tr")];
  rows.forEach((row, at) => { row.hidden = box.dataset.first !== "" && at >= Number(box.dataset.first); });
}

function startFirst(box) {
  const count = box.querySelectorAll("tbody tr").length;
  if (count <= Number(box.dataset.first)) return;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = `Show all ${count} rows`;
  button.addEventListener("click", () => {
    box.dataset.first = "";
    showFirst(box);
    button.remove();
  });
  box.after(button);
  showFirst(box);
}

// Says that a table goes on to the right, as long as it does.
function startHints() {
  const seen = new ResizeObserver((entries) => entries.forEach(({ target }) => hint(target)));
  const hint = (box) => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  for (const box of document.querySelectorAll(".scroll")) {
    seen.observe(box);
    box.addEventListener("scroll", () => hint(box), { passive: true });
  }
}

// The sections' names: a line where there is room for it, otherwise a list behind a button.
function startMenu() {
  const menu = document.querySelector(".menu");
  const wide = matchMedia("(min-width: 64rem)");
  const fit = () => { menu.open = wide.matches; };
  wide.addEventListener("change", fit);
  menu.addEventListener("click", (event) => { if (event.target.closest("a")) fit(); });
  fit();
}

function startTables() {
  startMenu();
  startHints();
  document.querySelectorAll(".scroll[data-first]").forEach(startFirst);
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, place) => {
      const first = head.dataset.numeric !== "true"; // of numbers the largest is wanted first
      head.querySelector("button")?.addEventListener("click", () => {
        const sorted = head.getAttribute("aria-sort");
        sortBy(table, place, sorted === null ? first : sorted !== "ascending");
      });
    });
  }
  for (const select of document.querySelectorAll("select[data-table]")) {
    const table = document.getElementById(select.dataset.table);
    const place = Number(select.dataset.column);
    const found = new Set([...table.tBodies[0].rows].map((row) => row.cells[place].textContent.trim()));
    for (const text of [...found].sort()) select.append(new Option(text, text));
    select.addEventListener("change", () => chooseRows(table));
  }
}

function chooseRows(table) {
  const chosen = [...document.querySelectorAll(`select[data-table="${table.id}"]`)].filter((each) => each.value);
  let shown = 0;
  for (const row of table.tBodies[0].rows) {
    row.hidden = chosen.some((each) => row.cells[Number(each.dataset.column)].textContent.trim() !== each.value);
    shown += !row.hidden;
  }
  const told = document.getElementById(`${table.id}-shown`);
  if (told) told.textContent = `${shown} of ${table.tBodies[0].rows.length} rows`;
}
