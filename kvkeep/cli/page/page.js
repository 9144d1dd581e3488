"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;

  // "@name" is the value of the CSS variable --name, in the theme that is shown.
  const resolve = (value, style) => {
    if (typeof value === "string" && value.startsWith("@")) {
      return style.getPropertyValue("--" + value.slice(1)).trim();
    }
    if (Array.isArray(value)) return value.map((inner) => resolve(inner, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolve(v, style)]));
    }
    return value;
  };

  const draw = () => {
    const style = getComputedStyle(root);
    for (const [name, figure] of Object.entries(figures)) {
      const { data, layout } = resolve(figure, style);
      Plotly.react(name, data, layout, { displayModeBar: false, responsive: true });
    }
  };

  const theme = document.getElementById("theme");
  theme.addEventListener("change", () => {
    if (theme.value === "system") delete root.dataset.theme;
    else root.dataset.theme = theme.value;
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  if (window.Plotly) draw();

  const table = document.getElementById("recent");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const at = (name) => heads.findIndex((head) => head.textContent === name);
  const [model, reason, lost] = [at("Model"), at("Reason"), at("Lost")];
  const text = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

  const fill = (select, column) => {
    const values = new Set(rows.map((row) => row.cells[column].textContent));
    for (const value of [...values].sort()) select.add(new Option(value, value));
  };
  const wanted = {
    text: document.getElementById("find"),
    model: document.getElementById("model"),
    reason: document.getElementById("reason"),
    lost: document.getElementById("lost-least"),
  };
  fill(wanted.model, model);
  fill(wanted.reason, reason);

  const filter = () => {
    const word = wanted.text.value.trim().toLowerCase();
    const least = Number(wanted.lost.value) || 0;
    let shown = 0;
    for (const row of rows) {
      const fits =
        text.get(row).includes(word) &&
        (!wanted.model.value || row.cells[model].textContent === wanted.model.value) &&
        (!wanted.reason.value || row.cells[reason].textContent === wanted.reason.value) &&
        Number(row.cells[lost].dataset.n) >= least;
      row.hidden = !fits;
      shown += fits;
    }
    document.getElementById("shown").textContent =
      `${shown.toLocaleString("en")} of ${rows.length.toLocaleString("en")} shown`;
  };
  for (const input of Object.values(wanted)) input.addEventListener("input", filter);
  filter();

  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.n === undefined ? cell.textContent : Number(cell.dataset.n);
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "descending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "ascending" : "descending");
      const sign = down ? 1 : -1;
      rows.sort((a, b) => {
        const [x, y] = [key(a, column), key(b, column)];
        return sign * (x < y ? -1 : x > y ? 1 : 0);
      });
      body.append(...rows);
    });
  });
})();
