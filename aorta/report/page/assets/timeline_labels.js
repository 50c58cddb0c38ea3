// Names of blocks and collectives inside their bars, as far as they fit, as in the pictures, and on a narrow page those of
// lanes above them. Drawn again when the view
// moves, so that zooming in shows more of them.

const SHORT_KINDS = { allreduce: "AR", reducescatter: "RS", allgather: "AG", alltoall: "A2A" };
const LABEL_ROOM = 6; // pixels beside the text
const pen = document.createElement("canvas").getContext("2d");
let labelsAsked = false;

// From the longest to the shortest; the first that fits is drawn.
function namesOf(kind, what, isCollective) {
  if (!isCollective) return [what.replace(/, [^,]*$/, "")];
  const [, size] = what.split(", ");
  const short = SHORT_KINDS[kind] ?? kind;
  return [`${kind} ${size}`, `${short} ${size}`, short];
}

function label(timeline) {
  const plot = charts.get_model_by_name(`timeline-${timeline.number}`);
  const source = charts.get_model_by_name(`timeline-labels-${timeline.number}`);
  const made = { x: [], y: [], text: [], align: [], ink: [], ground: [] };
  const { start, end } = plot.x_range;
  const scale = (plot.inner_width || 0) / (end - start);
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  const ink = getComputedStyle(root).getPropertyValue("--ink");
  for (const { y, name } of timeline.named ?? []) {
    made.x.push(start); // and to the right of it: whatever the width of the page is in the end, it is not cut
    made.y.push(y);
    made.text.push(name);
    made.align.push("left");
    made.ink.push(ink);
    made.ground.push("rgba(0, 0, 0, 0)");
  }
  const taken = new Map(); // row -> where its last name ends: bars of a row may overlap
  for (const bar of timeline.labelled ?? []) {
    const left = Math.max(bar.left, start);
    const right = Math.min(bar.right, end);
    const room = (right - left) * scale - LABEL_ROOM;
    if (room < 8) continue;
    const name = bar.names.find((each) => pen.measureText(each).width <= room);
    if (name === undefined) continue;
    const half = (pen.measureText(name).width + LABEL_ROOM) / 2 / scale;
    const middle = (left + right) / 2;
    if (middle - half < (taken.get(bar.y) ?? -Infinity)) continue;
    taken.set(bar.y, middle + half);
    made.x.push(middle);
    made.y.push(bar.y);
    made.text.push(plain(name));
    made.align.push("center");
    made.ink.push(data.textOn[bar.color]);
    made.ground.push(bar.color);
  }
  source.data = made;
}

function labelSoon() {
  if (labelsAsked) return;
  labelsAsked = true;
  requestAnimationFrame(() => {
    labelsAsked = false;
    for (const each of timelines) if (each.steps.length) label(each);
  });
}

function startLabels() {
  for (const each of timelines.filter(({ steps }) => steps.length)) {
    charts.get_model_by_name(`timeline-${each.number}`).properties.inner_width.change.connect(labelSoon);
  }
  const range = charts.get_model_by_name("timeline-x");
  range.properties.start.change.connect(labelSoon);
  range.properties.end.change.connect(labelSoon);
}
