"use strict";
// Light and dark: the page follows its variables, the charts are recoloured one by one.

const root = document.documentElement;
const data = JSON.parse(document.getElementById("page-data").textContent);
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const original = new WeakMap(); // model -> { property: its colour on a light background }
let charts = null; // the document of Bokeh, once it is there

function isDark() {
  const chosen = root.dataset.theme;
  return chosen ? chosen === "dark" : prefersDark.matches;
}

function onBackground(color, dark) {
  return dark && typeof color === "string" ? data.dark[color.toLowerCase()] ?? color : color;
}

function colorsOf(model) {
  if (!original.has(model)) {
    const found = {};
    for (const property of model) {
      if (!property.attr.endsWith("_color")) continue;
      const value = property.get_value();
      const color = value !== null && typeof value === "object" ? value.value : value;
      if (typeof color === "string" && color.toLowerCase() in data.dark) found[property.attr] = color;
    }
    original.set(model, found);
  }
  return original.get(model);
}

function recolor(dark) {
  if (charts === null) return;
  for (const model of charts.all_models) {
    const changed = {};
    for (const [name, color] of Object.entries(colorsOf(model))) changed[name] = onBackground(color, dark);
    if (Object.keys(changed).length) model.setv(changed);
    if (model.type === "ColumnDataSource" && model.data.color) {
      model.light ??= Array.from(model.data.color);
      model.data = { ...model.data, color: model.light.map((color) => onBackground(color, dark)) };
    }
  }
}

function startTheme() {
  const button = document.getElementById("theme");
  const show = () => {
    const dark = isDark();
    button.textContent = dark ? "Light theme" : "Dark theme"; // what it does
    for (const each of document.querySelectorAll("[data-light]")) {
      each.style.setProperty("--swatch", onBackground(each.dataset.light, dark));
    }
    recolor(dark);
    drawTimelines();
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    show();
  });
  prefersDark.addEventListener("change", show);
  // Paper is white and narrow, whatever the screen is: light, charts as wide as the page, folds as they are.
  const paperPixels = 690; // 190 mm of A4 between margins of 10 mm, at 96 to an inch, and a little less
  let before;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    for (const each of document.querySelectorAll(".plot")) {
      const width = each.clientWidth;
      const beside = each.closest(".pair")?.childElementCount > 1;
      const paper = beside ? paperPixels / 2 - 12 : paperPixels;
      if (!each.checkVisibility()) continue;
      each.style.width = `${width}px`;
      each.style.zoom = Math.min(1, paper / width);
    }
    show();
  });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    for (const each of document.querySelectorAll(".plot")) each.style.width = each.style.zoom = "";
    show();
  });
  show();
}
