// Puts the charts into the page, and gives their controls something to do.

function rangesOf(name) {
  const plot = charts.get_model_by_name(name);
  return plot ? [plot.x_range] : [];
}

function move(range, factor, shift) {
  const width = range.end - range.start;
  const middle = (range.start + range.end) / 2 + shift * width;
  range.setv({ start: middle - (factor * width) / 2, end: middle + (factor * width) / 2 });
}

const MOVES = { in: [0.5, 0], out: [2, 0], left: [1, -0.25], right: [1, 0.25] };

function startControls() {
  for (const group of document.querySelectorAll("[data-charts]")) {
    const names = group.dataset.charts.split(" ");
    const plots = names.map((name) => charts.get_model_by_name(name)).filter(Boolean);
    const ranges = [...new Set(plots.map((plot) => plot.x_range))];
    const before = new Map(plots.flatMap((plot) => [plot.x_range, plot.y_range]).map((each) => [each, [each.start, each.end]]));
    group.addEventListener("click", ({ target }) => {
      const what = target.closest("button")?.dataset.move;
      if (!what) return;
      for (const range of ranges) {
        if (what !== "reset") move(range, ...MOVES[what]);
        else if (range.reset_start != null) range.setv({ start: range.reset_start, end: range.reset_end });
        else range.setv({ start: before.get(range)[0], end: before.get(range)[1] });
      }
      if (what === "reset") {
        for (const plot of plots) {
          if (plot.y_range.type === "DataRange1d") {
            const [start, end] = before.get(plot.y_range);
            plot.y_range.setv({ start, end });
          }
        }
      }
    });
    for (const radio of group.querySelectorAll("input[data-drag]")) {
      radio.addEventListener("change", () => {
        for (const plot of plots) {
          plot.toolbar.active_drag = plot.toolbar.tools.find((tool) => tool.type === radio.value);
        }
      });
    }
  }
  for (const box of document.querySelectorAll("input[data-dataset]")) {
    box.addEventListener("change", () => showDataset(Number(box.dataset.dataset), box.checked));
  }
  const metric = document.getElementById("map-metric");
  const stretched = document.getElementById("map-stretched");
  for (const each of [metric, stretched]) {
    each?.addEventListener("change", () => showMap(metric.value, stretched.checked));
  }
  if (metric) showMap(metric.value, stretched.checked);
}

function showDataset(number, shown) {
  for (const box of document.querySelectorAll(`input[data-dataset="${number}"]`)) box.checked = shown;
  for (const model of charts.all_models) {
    if (model.tags?.includes(`dataset-${number}`)) model.visible = shown;
  }
  for (const each of document.querySelectorAll(`figure[data-dataset="${number}"]`)) each.hidden = !shown;
}

function showMap(name, stretched) {
  let low = Infinity;
  let high = -Infinity;
  data.labels.forEach((_, number) => {
    const source = charts.get_model_by_name(`map-data-${number}`);
    if (!source) return;
    source.data = { ...source.data, image: source.data[name] };
    for (const value of source.data[name][0]) {
      if (Number.isFinite(value)) {
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
  });
  if (!stretched) [low, high] = name === "overlap_ratio" ? [0, 1] : [Math.min(0, low), Math.max(0, high)];
  if (!(high > low)) high = low + 1;
  charts.get_model_by_name("map-colors").setv({ low, high });
}

// On a narrow page fewer numbers along an axis, so that they do not run into each other.
function startTicks() {
  const fit = (plot) => {
    for (const axis of plot.below) {
      if (axis.ticker.desired_num_ticks !== undefined) axis.ticker.desired_num_ticks = plot.inner_width < 320 ? 3 : 6;
    }
  };
  for (const name of Object.keys(data.roots)) {
    const plot = charts.get_model_by_name(name);
    plot.properties.inner_width.change.connect(() => fit(plot));
    fit(plot);
  }
}

async function start() {
  startTables();
  const ids = Object.fromEntries(Object.entries(data.roots).map(([name, id]) => [id, `chart-${name}`]));
  if (Object.keys(ids).length) {
    Bokeh.set_log_level("error");
    await Bokeh.embed.embed_items({ page: data.document }, [{ docid: "page", roots: ids, root_ids: Object.keys(ids) }]);
    charts = Bokeh.documents.at(-1);
    startControls();
    startTicks();
    startTimelines();
  }
  startTheme();
  root.dataset.ready = "true";
}

start();
