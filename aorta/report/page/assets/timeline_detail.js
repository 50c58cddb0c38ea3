// One collective of the timelines: zoom to it, and say who came last, who waited, and whose computation it held up.

const DETAIL_COLUMNS = ["rank", "starts", "ends", "waits for peers", "transfer", "computation blocked", "goes on"];
const NEAR_MS = 0.02; // a stall and the collective that ends it were read from the clock one after the other
let chosen = null; // { timeline, instance }

function stepOf(timeline, at) {
  const number = timeline.steps[at].global_step;
  return timeline.steps.findIndex((each) => each.global_step === number); // spans of one step are held once
}

// Spans of a step, by what they are: collectives by instance, all of them by rank, stalls by rank.
function collectivesOf(timeline, step) {
  const { columns, kinds, whats, ranks } = timeline;
  const byInstance = new Map();
  const byRank = new Map();
  const stalls = new Map();
  for (let at = 0; at < columns.rank.length; at += 1) {
    if (columns.step[at] !== step) continue;
    const span = { rank: ranks[columns.rank[at]], start: columns.start[at], end: columns.start[at] + columns.length[at] };
    const into = (map, key) => {
      if (!map.has(key)) map.set(key, []);
      map.get(key).push(span);
    };
    if (kinds[columns.kind[at]] === BLOCKED) into(stalls, span.rank);
    const instance = columns.instance[at];
    if (instance < 0) continue;
    Object.assign(span, { wait: columns.wait[at], seq: columns.seq[at], what: whats[columns.what[at]] });
    into(byInstance, instance);
    into(byRank, span.rank);
  }
  return { byInstance, byRank, stalls };
}

// Stalls of a rank during a collective. What ends a stall is the last collective that ended before computation went on.
function blockedBy(span, found) {
  const during = (found.stalls.get(span.rank) ?? []).filter((each) => each.start < span.end && each.end > span.start);
  return during.map((stall) => {
    const ends = found.byRank.get(span.rank).map(({ end }) => end).filter((end) => end > stall.start && end <= stall.end + NEAR_MS);
    return { ...stall, endedByIt: span.end === Math.max(...ends) };
  });
}

function lastToArrive(spans) {
  const waits = spans.map(({ wait }) => wait);
  if (spans.length < 2 || !waits.every(Number.isFinite)) return null;
  const least = Math.min(...waits);
  const last = spans.filter(({ wait }) => wait === least);
  return last.length === 1 ? last[0].rank : null;
}

function cell(row, tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (tag === "th") made.scope = row.parentElement?.tagName === "THEAD" ? "col" : "row";
  row.append(made);
}

function paragraph(panel, text) {
  const made = document.createElement("p");
  made.textContent = text;
  panel.append(made);
}

function sentencesOf(rows, last) {
  const told = [];
  const waited = rows.filter(({ rank, wait }) => rank !== last && Number.isFinite(wait));
  if (last === null) told.push("Which rank arrived last is not known here.");
  else told.push(`Rank ${last} arrived last; ${waited.map(({ rank, wait }) => `rank ${rank} waited ${ms(wait)}`).join(", ")}.`);
  const ended = rows.flatMap(({ rank, blocked }) => blocked.filter(({ endedByIt }) => endedByIt).map((each) => ({ rank, ...each })));
  if (ended.length) {
    const parts = ended.map(({ rank, start, end }) => `on rank ${rank} (${ms(start, 4)} to ${ms(end, 4)}, ${ms(end - start)})`);
    told.push(`Its end let computation go on ${parts.join(", ")}.`);
  } else if (rows.some(({ blocked }) => blocked.length)) {
    told.push("Computation was blocked meanwhile, and went on after a later collective.");
  } else {
    told.push("No computation was blocked on it: it is hidden, or nothing was left to compute.");
  }
  return told;
}

function showDetail() {
  const panel = document.getElementById("timeline-detail");
  panel.hidden = chosen === null;
  panel.replaceChildren();
  for (const each of timelines.filter(({ steps }) => steps.length)) mark(each, null);
  if (chosen === null) return;
  const { timeline, instance } = chosen;
  // Below its timeline, which stays where it is under the pointer.
  document.getElementById(`chart-timeline-${timeline.number}`).closest("figure").after(panel);
  const found = collectivesOf(timeline, stepOf(timeline, chosenFilters().step));
  const spans = [...(found.byInstance.get(instance) ?? [])].sort((left, right) => left.rank - right.rank);
  const last = lastToArrive(spans);
  const rows = spans.map((span) => ({ ...span, blocked: blockedBy(span, found) }));
  const title = document.createElement("h3");
  const number = spans[0].seq < 0 ? "" : `, number ${spans[0].seq}`;
  title.textContent = `${spans[0].what}${number} (${timeline.label})`;
  panel.append(title);
  for (const sentence of sentencesOf(rows, last)) paragraph(panel, sentence);
  const box = document.createElement("div");
  box.className = "scroll";
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "The collective on each rank");
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const column of DETAIL_COLUMNS) cell(head, "th", column);
  const body = table.createTBody();
  for (const { rank, start, end, wait, blocked } of rows) {
    const row = body.insertRow();
    cell(row, "th", rank === last ? `${rank} (last to arrive)` : `${rank}`);
    for (const value of [start, end]) cell(row, "td", ms(value, 4));
    for (const value of [wait, Number.isFinite(wait) ? Math.max(0, end - start - wait) : NaN]) cell(row, "td", ms(value));
    cell(row, "td", blocked.length ? blocked.map((each) => `${ms(each.start, 4)} to ${ms(each.end, 4)}`).join(", ") : "no");
    cell(row, "td", blocked.map(({ endedByIt }) => (endedByIt ? "when it ends" : "after a later one")).join(", ") || "–");
  }
  box.append(table);
  panel.append(box);
  paragraph(panel, `${timeline.clock} Ranks that are not drawn are not listed.`);
  const close = document.createElement("button");
  close.type = "button";
  close.textContent = "Close, and show the whole step";
  close.addEventListener("click", () => {
    choose(null);
    showStep();
    document.getElementById("timeline-collective").focus();
  });
  panel.append(close);
  mark(timeline, rows);
  return rows;
}

// Outlines the collective on the ranks that are shown, and what it held up.
function mark(timeline, rows) {
  const source = charts.get_model_by_name(`timeline-chosen-${timeline.number}`);
  const made = { top: [], bottom: [], left: [], right: [] };
  if (rows !== null) {
    const spans = charts.get_model_by_name(`timeline-spans-${timeline.number}`).data;
    for (let at = 0; at < spans.left.length; at += 1) {
      if (spans.instance[at] !== chosen.instance) continue;
      for (const key of Object.keys(made)) made[key].push(spans[key][at]);
    }
  }
  source.data = made;
}

function zoomTo(rows) {
  const marks = rows.flatMap(({ start, end, blocked }) => [{ start, end }, ...blocked]);
  const start = Math.min(...marks.map((each) => each.start));
  const end = Math.max(...marks.map((each) => each.end));
  const beside = 0.08 * (end - start) || 0.1;
  charts.get_model_by_name("timeline-x").setv({ start: start - beside, end: end + beside });
}

function choose(next) {
  chosen = next;
  document.getElementById("timeline-collective").value = next === null ? "" : `${next.timeline.number}:${next.instance}`;
  const rows = showDetail();
  if (rows) zoomTo(rows);
}

// What the list offers in the step that is shown: one entry a collective, in order of its first start.
function listCollectives() {
  const select = document.getElementById("timeline-collective");
  chosen = null;
  select.replaceChildren(new Option("none", ""));
  for (const timeline of timelines.filter(({ steps }) => steps.length)) {
    const { byInstance } = collectivesOf(timeline, stepOf(timeline, chosenFilters().step));
    const group = document.createElement("optgroup");
    group.label = timeline.label;
    const first = (spans) => Math.min(...spans.map(({ start }) => start));
    const entries = [...byInstance].sort(([, left], [, right]) => first(left) - first(right));
    for (const [instance, spans] of entries) {
      group.append(new Option(`${spans[0].what}, at ${ms(first(spans), 4)}`, `${timeline.number}:${instance}`));
    }
    if (entries.length) select.append(group);
  }
  select.disabled = select.options.length === 1;
  showDetail();
}

function startDetail() {
  const select = document.getElementById("timeline-collective");
  select.addEventListener("change", () => {
    const [number, instance] = select.value.split(":").map(Number);
    if (select.value) choose({ timeline: timelines[number], instance });
    else {
      choose(null);
      showStep();
    }
  });
  for (const timeline of timelines.filter(({ steps }) => steps.length)) {
    const source = charts.get_model_by_name(`timeline-spans-${timeline.number}`);
    source.selected.properties.indices.change.connect(() => {
      const [at] = source.selected.indices;
      if (at === undefined) return;
      const instance = source.data.instance[at];
      source.selected.indices = [];
      if (instance >= 0) choose({ timeline, instance });
    });
  }
}
