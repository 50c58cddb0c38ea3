// Timelines: the spans that the filters leave, laid out in rows, handed to the charts.

const NUMBERS = {
  uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, int32: Int32Array, float32: Float32Array,
};
const BLOCKED = "blocked on a collective";
const NAME_HEIGHT = 0.75; // of a row: on a narrow page the name of a lane stands above its bars
const SHORT_LANES = { "exposed communication": "exposed" };

function unpack({ type, data: text }) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new NUMBERS[type](bytes.buffer);
}

// Text between delimiters of TeX would be typeset on a canvas; a mark of no width takes them apart.
function plain(text) {
  return text.replace(/\$\$|\\[[\]()]/g, (mark) => `${mark[0]}\u200b${mark[1]}`);
}

// Three digits and at most three decimals, as in the tables; of a place in a step one more digit.
function ms(value, digits = 3) {
  if (!Number.isFinite(value)) return "unknown";
  const before = value ? Math.floor(Math.log10(Math.abs(value))) + 1 : 1;
  const text = value.toLocaleString("en", { maximumFractionDigits: Math.min(Math.max(digits - before, 0), 3) });
  return `${value && Math.abs(value) < 0.0005 ? "<0.001" : text} ms`;
}

const unpackAll = (columns) => Object.fromEntries(Object.entries(columns).map(([name, packed]) => [name, unpack(packed)]));
const timelines = data.timelines.map((each, number) => ({
  ...each, number, columns: unpackAll(each.columns), windows: unpackAll(each.windows),
}));

// "0-3, 8" -> ranks; null where it is not such a list.
function parseRanks(text) {
  const found = new Set();
  for (const part of text.split(",").map((each) => each.trim()).filter(Boolean)) {
    const match = /^(-?\d+)(?:\s*-\s*(-?\d+))?$/.exec(part);
    if (!match) return null;
    const first = Number(match[1]);
    const last = match[2] === undefined ? first : Number(match[2]);
    if (last < first || last - first > 100_000) return null;
    for (let rank = first; rank <= last; rank += 1) found.add(rank);
  }
  return found.size ? found : null;
}

function listRanks(ranks) {
  const parts = [];
  for (const rank of ranks) {
    const last = parts.at(-1);
    if (last && last[1] === rank - 1) last[1] = rank;
    else parts.push([rank, rank]);
  }
  return parts.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ");
}

function checked(what) {
  return new Set([...document.querySelectorAll(`input[data-${what}]`)].filter((each) => each.checked).map((each) => each.value));
}

// What the controls say now.
function chosenFilters() {
  const text = document.getElementById("timeline-ranks").value.trim();
  return {
    step: Number(document.getElementById("timeline-step").value),
    ranks: text ? parseRanks(text) : new Set(timelines.flatMap((each) => each.ranks)),
    lanes: checked("lane"),
    kinds: checked("kind"),
  };
}

function layOut(timeline, filters, above) {
  const { columns, lanes, kinds, ranks } = timeline;
  const step = stepOf(timeline, filters.step);
  const chosen = [];
  const used = new Set();
  for (let at = 0; at < columns.rank.length; at += 1) {
    if (columns.step[at] !== step || !filters.ranks.has(ranks[columns.rank[at]])) continue;
    if (!filters.lanes.has(lanes[columns.lane[at]]) || !filters.kinds.has(kinds[columns.kind[at]])) continue;
    chosen.push(at);
    used.add(columns.rank[at] * lanes.length + columns.lane[at]);
  }
  const rows = [...used].sort((left, right) => left - right);
  const top = new Map();
  let y = 0;
  rows.forEach((row, at) => {
    if (at && Math.floor(rows[at - 1] / lanes.length) !== Math.floor(row / lanes.length)) y += 0.6;
    y += above;
    top.set(row, y);
    y += 1;
  });
  return { chosen, top, height: Math.max(1, y) };
}

// The step of each rank that is shown, behind its rows, and how far its ends may be off on the clock of all. Returns when
// the last of them ended.
function fillSteps(timeline, step, top) {
  const { windows, ranks, lanes } = timeline;
  const boxes = { top: [], bottom: [], left: [], right: [] };
  const bounds = { top: [], bottom: [], left: [], right: [], told: [] };
  let last = 0;
  for (let at = 0; at < windows.rank.length; at += 1) {
    const rows = [...top].filter(([row]) => Math.floor(row / lanes.length) === windows.rank[at]).map(([, y]) => y);
    if (windows.step[at] !== step || !rows.length) continue;
    const [start, end, bound] = [windows.start[at], windows.start[at] + windows.length[at], windows.bound[at]];
    const add = (into, left, right) => {
      into.top.push(Math.min(...rows));
      into.bottom.push(Math.max(...rows) + 1);
      into.left.push(left);
      into.right.push(right);
    };
    add(boxes, start, end);
    for (const edge of bound > 0 ? [start, end] : []) {
      add(bounds, edge - bound, edge + bound);
      bounds.told.push(`the clock of rank ${ranks[windows.rank[at]]} is known to ${ms(bound)}`);
    }
    last = Math.max(last, end);
  }
  charts.get_model_by_name(`timeline-steps-${timeline.number}`).data = boxes;
  charts.get_model_by_name(`timeline-bounds-${timeline.number}`).data = bounds;
  return last;
}

function fill(timeline, filters, dark) {
  const plot = charts.get_model_by_name(`timeline-${timeline.number}`);
  const narrow = innerWidth < 700;
  const { chosen, top, height } = layOut(timeline, filters, narrow ? NAME_HEIGHT : 0);
  const { columns, lanes, kinds, ranks, whats } = timeline;
  const empty = () => ({ top: [], bottom: [], left: [], right: [], color: [], rank: [], what: [], begin: [], took: [], more: [], instance: [] });
  const ran = empty();
  const waits = empty();
  timeline.labelled = [];
  timeline.named = [];
  for (const at of chosen) {
    const kind = kinds[columns.kind[at]];
    const lane = columns.lane[at];
    const into = kind === BLOCKED ? waits : ran;
    const row = top.get(columns.rank[at] * lanes.length + lane);
    into.top.push(row + 0.06);
    into.bottom.push(row + 0.94);
    into.left.push(columns.start[at]);
    into.right.push(columns.start[at] + columns.length[at]);
    const color = onBackground(data.kindColors[kind], dark);
    into.color.push(color);
    into.instance.push(columns.instance[at]);
    into.rank.push(String(ranks[columns.rank[at]]));
    const what = whats[columns.what[at]];
    into.what.push(what);
    if (into === ran && what !== lanes[lane]) {
      const names = namesOf(kind, what, columns.instance[at] >= 0);
      timeline.labelled.push({ left: into.left.at(-1), right: into.right.at(-1), y: row + 0.5, color, names });
    }
    into.begin.push(ms(columns.start[at], 4));
    into.took.push(ms(columns.length[at]));
    const wait = columns.wait[at];
    const more = columns.seq[at] < 0 ? [] : [`number ${columns.seq[at]}`];
    if (Number.isFinite(wait)) more.push(`of it ${ms(wait)} waiting for peers`);
    into.more.push(more.join(", "));
  }
  charts.get_model_by_name(`timeline-spans-${timeline.number}`).data = ran;
  charts.get_model_by_name(`timeline-waits-${timeline.number}`).data = waits;
  const pixels = height > 130 ? 6 : height > 60 ? 11 : 20;
  if (pixels < 14) timeline.labelled = []; // rows are lower than letters
  const ticks = [];
  const labels = new Map();
  let before = null;
  for (const [row, y] of top) {
    const rank = ranks[Math.floor(row / lanes.length)];
    const fresh = rank !== before;
    before = rank;
    if (pixels < 11 && !fresh) continue;
    const lane = SHORT_LANES[lanes[row % lanes.length]] ?? lanes[row % lanes.length];
    const short = lane.length > 26 ? `${lane.slice(0, 25)}…` : lane;
    const name = plain(pixels < 11 ? `rank ${rank}` : fresh ? `rank ${rank}   ${short}` : short);
    if (narrow) {
      timeline.named.push({ y: y - NAME_HEIGHT / 2, name });
      continue;
    }
    ticks.push(y + 0.5);
    labels.set(y + 0.5, name);
  }
  const axis = plot.left[0];
  axis.major_label_overrides = labels;
  axis.ticker.ticks = ticks;
  plot.y_range.setv({ start: height, end: 0, reset_start: height, reset_end: 0 });
  plot.min_border_left = narrow ? 12 : 150;
  plot.height = Math.round(height * pixels + 40);
  const seen = new Set(chosen.map((at) => columns.rank[at])).size;
  const step = timeline.steps[filters.step];
  document.getElementById(`timeline-told-${timeline.number}`).textContent =
    `Global step ${step.global_step}, job step ${ms(step.job_step_ms)}: ${chosen.length.toLocaleString("en")} spans ` +
    `of ${seen} of ${timeline.ranks_in_run} ranks. ${timeline.clock}`;
  return fillSteps(timeline, stepOf(timeline, filters.step), top);
}

function drawTimelines() {
  if (charts === null || !document.getElementById("timeline-ranks")) return;
  const filters = chosenFilters();
  const field = document.getElementById("timeline-ranks");
  const problem = document.getElementById("timeline-problem");
  field.setAttribute("aria-invalid", String(filters.ranks === null));
  if (filters.ranks === null) {
    problem.textContent = "Ranks are numbers and ranges, as in 0-3, 8.";
    return;
  }
  const drawn = new Set(timelines.flatMap((each) => each.ranks));
  const absent = [...filters.ranks].filter((rank) => !drawn.has(rank));
  problem.textContent = absent.length ? `Not among the ranks drawn: ${listRanks(absent.sort((a, b) => a - b))}.` : "";
  const full = timelines.filter((each) => each.steps.length);
  const end = Math.max(...full.map((each) => fill(each, filters, isDark())));
  showDetail();
  labelSoon();
  return end;
}

// A new step begins unzoomed; switching a rank or a kind does not move the view.
function showStep() {
  const end = drawTimelines();
  if (end === undefined) return;
  const range = charts.get_model_by_name("timeline-x");
  range.setv({ start: 0, end: end || 1, reset_start: 0, reset_end: end || 1 });
}

function startTimelines() {
  const ranks = document.getElementById("timeline-ranks");
  if (!ranks) return;
  const first = [...new Set(timelines.flatMap((each) => each.shown_first))].sort((left, right) => left - right);
  ranks.value = listRanks(first);
  ranks.addEventListener("change", drawTimelines);
  document.getElementById("timeline-all").addEventListener("click", () => {
    ranks.value = "";
    drawTimelines();
  });
  document.getElementById("timeline-few").addEventListener("click", () => {
    ranks.value = listRanks(first);
    drawTimelines();
  });
  document.getElementById("timeline-step").addEventListener("change", () => {
    listCollectives();
    showStep();
  });
  for (const each of document.querySelectorAll("input[data-lane], input[data-kind]")) {
    each.addEventListener("change", drawTimelines);
  }
  listCollectives();
  startDetail();
  startLabels();
  showStep();
}
