// Puts the charts into the page, and gives their controls something to do.

const MOVES = { in: [0.5, 0], out: [2, 0], left: [1, -0.25], right: [1, 0.25] };
const KEYS = { w: "in", s: "out", a: "left", d: "right", r: "reset" };

// One toolbar, whose buttons move the timelines; the keys move the chart that has the focus or is under the pointer.
function moveChart(name, what) {
  const plot = charts.get_model_by_name(name);
  if (what === "reset") {
    Bokeh.index.find_one_by_id(plot.id).reset();
    return;
  }
  const [factor, shift] = MOVES[what];
  const [to, from] = plot.x_scale.type === "LogScale" ? [Math.log, Math.exp] : [Number, Number];
  const [start, end] = [to(plot.x_range.start), to(plot.x_range.end)];
  const middle = (start + end) / 2 + shift * (end - start);
  const half = (factor * (end - start)) / 2;
  plot.x_range.setv({ start: from(middle - half), end: from(middle + half) });
}

function moveByKey(event) {
  const what = KEYS[event.key.toLowerCase()];
  const typing = event.target.closest?.("select, input[type=text]");
  const place = document.activeElement.closest(".plot") ?? document.querySelector(".plot:hover");
  if (!what || !place || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  moveChart(place.id.replace(/^chart-/, ""), what);
}

function startControls() {
  const first = timelines.find(({ steps }) => steps.length);
  for (const button of document.querySelectorAll("button[data-move]")) {
    button.addEventListener("click", () => moveChart(`timeline-${first.number}`, button.dataset.move));
  }
  addEventListener("keydown", moveByKey);
  for (const radio of document.querySelectorAll("input[name=drag]")) {
    radio.addEventListener("change", () => {
      for (const { toolbar } of Object.keys(data.roots).map((name) => charts.get_model_by_name(name))) {
        toolbar.active_drag = toolbar.tools.find((tool) => tool.type === radio.value);
      }
    });
  }
  for (const box of document.querySelectorAll("input[data-dataset]")) {
    box.addEventListener("change", () => showDataset(Number(box.dataset.dataset), box.checked));
  }
}

function showDataset(number, shown) {
  for (const box of document.querySelectorAll(`input[data-dataset="${number}"]`)) box.checked = shown;
  for (const model of charts.all_models) {
    if (model.tags?.includes(`dataset-${number}`)) model.visible = shown;
  }
  for (const each of document.querySelectorAll(`figure[data-dataset="${number}"]`)) each.hidden = !shown;
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
