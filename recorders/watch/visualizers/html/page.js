// Page: findings, search, order, the table of layers, the panel of one layer, keys and themes.

const state = { query: "", sort: "network", down: false, order: layers.map((_, i) => i), open: null };
const heats = [];
let layered = [], flags = new Map(), told = new Map();

/** Findings by layer; and of each layer at how many ticks values were not finite, and the first of these. */
function collect() {
  for (const run of runs) for (const finding of run.findings ?? []) told.set(finding.layer, [...(told.get(finding.layer) ?? []), { ...finding, run }]);
  for (const chart of layered) if (!chart.across.length) for (const run of runs) for (const layer of chart.layers) {
    const found = badAt(chart, run, layer), known = flags.get(layer) ?? { count: 0, first: Infinity };
    if (found.length) flags.set(layer, { count: Math.max(known.count, found.length), first: Math.min(known.first, run.ticks[found[0]]) });
  }
}

function layerButton(name) {
  const layer = layers.indexOf(name);
  return layer < 0 ? element("b", {}, name) : element("button", { type: "button", class: "link", onclick: () => openPanel(layer) }, name);
}

/** Findings with the same reason are told together. */
function findingCards(run) {
  const groups = new Map();
  for (const finding of run.findings) { const key = finding.why + finding.remedy; groups.set(key, [...(groups.get(key) ?? []), finding]); }
  return [...groups.values()].map((group) => {
    const items = group.map((one) => element("li", {}, layerButton(one.layer), ` ${one.what}`)), rest = items.splice(6);
    return element("div", { class: "card finding" }, element("ul", {}, ...items), rest.length ? element("details", {}, element("summary", {}, `and ${rest.length} more`), element("ul", {}, ...rest)) : null,
      element("p", {}, `${group[0].why} Try: ${group[0].remedy}.`));
  });
}

function showFindings() {
  const boxes = runs.map((run, r) => {
    const cards = run.findings?.length ? findingCards(run) : [element("div", { class: `card ${run.findings ? "fine" : ""}` }, run.findings ? "Nothing wrong was found." : "No findings were computed for this page.")];
    return element("div", {}, runs.length > 1 ? element("h3", { class: r ? "second" : "first" }, nameOf(run)) : null, ...cards);
  });
  const strange = [...flags.keys()].sort((a, b) => flags.get(a).first - flags.get(b).first || a - b).slice(0, 6);
  const card = strange.length ? element("div", { class: "card finding" }, element("ul", {}, ...strange.map((layer) => element("li", {}, layerButton(layers[layer]), ` NaN or infinite values since tick ${flags.get(layer).first}, at ${flags.get(layer).count} ticks`))),
    element("p", {}, `${flags.size} ${flags.size > 1 ? "layers" : "layer"} recorded values that are not finite. Heat maps mark them in pink, line charts with \u25b2.`)) : null;
  $("findings").replaceChildren(...[card].filter(Boolean), element("div", { class: runs.length > 1 ? "runs" : "" }, ...boxes));
}

function showSummary() {
  const plural = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
  const parts = runs.map((run) => [run.name, plural(run.count, "tick"), run.count > 1 ? `${run.ticks[0]} to ${run.last}` : "", run.every > 1 ? `each point stands for ${run.every} ticks` : ""].filter(Boolean).join(", "));
  $("summary").textContent = [plural(new Set(layered.flatMap((chart) => chart.layers)).size, "layer"), ...parts, `written ${report.made.replace("T", " ").slice(0, 16)}`, report.live ? "the training goes on" : ""].filter(Boolean).join(" \u00b7 ");
}

// Order and search

function sorts() {
  const options = [["network", "network order"], ["name", "name"], ["alarm", "findings first"]].map(([value, text]) => element("option", { value }, text));
  layered.forEach((chart, c) => options.push(element("optgroup", { label: chart.title }, ...[["last", "last value"], ["change", "change over time"], ...(runs.length > 1 ? [["runs", "difference of the runs"]] : [])].map(([kind, text]) => element("option", { value: `${kind} ${c}` }, `${chart.title}: ${text}`)))));
  $("sort").replaceChildren(...options);
}

function keyOf(sort) {
  const [kind, c] = sort.split(" "), chart = layered[c], of = (layer, run) => series(chart, run, layer, lineOf(chart));
  if (kind === "name") return (layer) => layers[layer];
  if (kind === "alarm") return (layer) => (told.get(layers[layer])?.length ?? 0) * 1e6 + (flags.get(layer)?.count ?? 0);
  if (kind === "last") return (layer) => { const value = last(of(layer, runs[0])); return isBad(value) ? Infinity : value; };
  if (kind === "change") return (layer) => Math.max(...runs.map((run) => change(of(layer, run).find((value) => value !== MISSING), last(of(layer, run))) ?? -1));
  if (kind === "runs") return (layer) => change(last(of(layer, runs[0])), last(of(layer, runs[1])));
  return (layer) => layer;
}

/** Applies search and order to the table and the heat maps. Layers without a value come last, in either direction. */
function arrange() {
  const wanted = state.query.toLowerCase().split(/\s+/).filter(Boolean), key = keyOf(state.sort), inCharts = new Set(layered.flatMap((chart) => chart.layers));
  const found = layers.map((name, layer) => layer).filter((layer) => inCharts.has(layer) && wanted.every((word) => layers[layer].toLowerCase().includes(word)));
  const keys = new Map(found.map((layer) => [layer, key(layer)])), turn = state.down ? -1 : 1;
  state.order = found.sort((a, b) => {
    const x = keys.get(a), y = keys.get(b);
    if (x === undefined || y === undefined) return (x === undefined) - (y === undefined) || a - b;
    return turn * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x < y ? -1 : x > y ? 1 : 0) || a - b;
  });
  $("sort").value = state.sort;
  $("reverse").setAttribute("aria-pressed", state.down);
  $("count").textContent = `${found.length} of ${inCharts.size}`;
  titles();
  $("table").scrollTop = 0;
  rows();
  for (const heat of heats) heat.show();
  remember();
}
function sortBy(sort, down) { state.sort = sort; state.down = down ?? (sort !== "network" && sort !== "name"); arrange(); }

// The table: only the rows in view exist.

const ROW = 36, TOP = 52, NAME = 240, CELL = 172;  // pixels
let columns = "";
function titles() {
  columns = `minmax(${NAME}px, 1.4fr) repeat(${layered.length}, minmax(${CELL}px, 1fr))`;
  const sorted = (sort) => state.sort === sort ? (state.down ? "descending" : "ascending") : "none";
  const title = (sort, text, style) => element("div", { role: "columnheader", class: style, "aria-sort": sorted(sort) }, element("button", { type: "button", onclick: () => sortBy(sort, state.sort === sort ? !state.down : undefined) }, `${text} ${{ ascending: "\u25b2", descending: "\u25bc", none: "" }[sorted(sort)]}`));
  const row = element("div", { role: "row", class: "row titles", "aria-rowindex": 1 }, title("network", "Layer", "name"), ...layered.map((chart, c) => title(`last ${c}`, chart.title)));
  shaped(row);
  row.style.height = `${TOP}px`;
  $("table").setAttribute("aria-rowcount", state.order.length + 1);
  $("table").replaceChildren(row, element("div", { id: "space", role: "presentation" }));
  $("space").style.height = `${state.order.length * ROW}px`;
  $("table").style.height = `${Math.min(560, TOP + state.order.length * ROW + 18)}px`;
}

function shaped(row) {
  row.style.gridTemplateColumns = columns;
  row.style.minWidth = `${NAME + layered.length * CELL}px`;
}

function rows() {
  const box = $("table"), start = Math.max(0, Math.floor(box.scrollTop / ROW) - 4), end = Math.min(state.order.length, start + Math.ceil(box.clientHeight / ROW) + 8);
  const kept = new Map([...box.querySelectorAll(".row.body")].map((row) => [Number(row.dataset.at), row]));
  for (const [at, row] of kept) if ((at < start || at >= end) && !row.contains(document.activeElement)) row.remove();
  for (let at = start; at < end; at++) if (!kept.has(at)) box.append(rowOf(state.order[at], at));
}

function rowOf(layer, at) {
  const bad = flags.get(layer), found = told.get(layers[layer]);
  const row = element("div", { role: "row", class: "row body", "aria-rowindex": at + 2, "data-at": at },
    element("div", { role: "rowheader", class: "name" }, element("button", { type: "button", class: "link", title: layers[layer], onclick: () => openPanel(layer) }, layers[layer]),
      bad || found ? element("span", { class: "bad", title: [...(found ?? []).map((one) => one.what), bad ? "NaN or infinite values" : ""].filter(Boolean).join("; "), "aria-label": "has findings" }, "\u25b2") : null),
    ...layered.map((chart) => {
      const lines = runs.map((run, r) => ({ values: series(chart, run, layer, lineOf(chart)), colour: runs.length > 1 ? RUN[r] : "--mean" }));
      const values = lines.map((line, r) => element("span", { class: isBad(last(line.values)) ? "bad" : runs.length > 1 ? RUN[r].slice(2) : "" }, shown(last(line.values))));
      const empty = lines.every((line) => last(line.values) === undefined);
      return element("div", { role: "cell", class: "figure" }, empty ? element("span") : canvasOf({ "aria-hidden": "true" }, (canvas) => drawSpark(canvas, lines)), empty ? "\u2013" : element("span", {}, ...values));
    }));
  shaped(row);
  row.style.top = `${TOP + at * ROW}px`;
  return row;
}

/** Moves the focus by some rows. */
function step(move) {
  const focused = document.activeElement.closest?.(".row.body"), at = focused ? Number(focused.dataset.at) + move : 0;
  if (at < 0 || at >= state.order.length) return;
  const box = $("table"), top = at * ROW;
  if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - TOP - 2 * ROW) box.scrollTop = Math.max(0, top - box.clientHeight / 2);
  rows();
  box.querySelector(`[data-at="${at}"] .link`).focus();
}

// The panel of one layer

function openPanel(layer) {
  const panel = $("panel"), at = state.order.indexOf(layer), found = told.get(layers[layer]) ?? [];
  const go = (move) => ({ type: "button", disabled: state.order[at + move] === undefined || at < 0, onclick: () => turn(move) });
  state.open = layer;
  hush();
  panel.replaceChildren(
    element("div", { class: "bar-top" }, element("h2", { id: "panel-title" }, layers[layer]), element("button", { ...go(-1), id: "previous", "aria-label": "Previous layer" }, "\u2190"),
      element("button", { ...go(1), id: "next", "aria-label": "Next layer" }, "\u2192"), element("button", { type: "button", id: "close", "aria-label": "Close", onclick: () => panel.close() }, "\u2715")),
    ...found.map((one) => element("div", { class: "card finding" }, runs.length > 1 ? `${nameOf(one.run)}: ` : "", element("b", {}, one.what), element("p", {}, `${one.why} Try: ${one.remedy}.`))),
    ...layered.filter((chart) => chart.place.has(layer)).map((chart) => layerCard(chart, layer)));
  if (!panel.open) panel.showModal();
  panel.scrollTop = 0;
  remember();
}
function turn(move) {
  const next = state.order[state.order.indexOf(state.open) + move];
  if (state.order.includes(state.open) && next !== undefined) openPanel(next);
}

// What the address and the browser remember: the layer, the search, the order; the theme.

function remember() {
  const kept = new URLSearchParams({ ...(state.query && { q: state.query }), ...(state.sort !== "network" && { sort: state.sort }), ...(state.down && { down: 1 }), ...(state.open !== null && { layer: layers[state.open] }) });
  history.replaceState(null, "", `#${kept}`);
}
function stored(key, value) {
  try { return value === undefined ? localStorage.getItem(key) : localStorage.setItem(key, value); } catch { return null; }
}
const dark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
function theme(name) {
  if (name) { document.documentElement.dataset.theme = name; stored("recorders-theme", name); }
  $("theme").textContent = dark() ? "Light" : "Dark";
  redraw();
}

const KEYS = [
  ["/", "search layers", () => $("search").focus()], ["j", "next layer, also in the panel", () => ($("panel").open ? turn(1) : step(1))], ["k", "previous layer", () => ($("panel").open ? turn(-1) : step(-1))],
  ["Enter", "open the layer that has the focus"], ["Esc", "close the panel, clear the search"], ["s", "choose the order", () => $("sort").focus()], ["d", "reverse the order", () => sortBy(state.sort, !state.down)],
  ["f", "findings", () => $("h-findings").scrollIntoView()], ["h", "heat maps", () => $("h-heat").scrollIntoView()], ["l", "table of layers", () => $("h-layers").scrollIntoView()],
  ["t", "dark or light", () => theme(dark() ? "light" : "dark")], ["r", "open again every 10 seconds, while the training goes on", () => report.live && $("follow").click()], ["?", "this list", () => help()],
  ["arrows", "on a chart: move from tick to tick; on a heat map also from layer to layer"],
];
function help() {
  if ($("help").open) return $("help").close();
  $("help").replaceChildren(element("h2", { id: "help-title" }, "Keyboard"), element("table", {}, ...KEYS.map(([key, text]) => element("tr", {}, element("th", { scope: "row" }, element("kbd", {}, key)), element("td", {}, text)))), element("button", { type: "button", onclick: () => $("help").close() }, "Close"));
  $("help").showModal();
}

function listen() {
  $("search").addEventListener("input", () => { state.query = $("search").value; arrange(); });
  $("sort").addEventListener("change", () => sortBy($("sort").value));
  $("reverse").addEventListener("click", () => sortBy(state.sort, !state.down));
  $("theme").addEventListener("click", () => theme(dark() ? "light" : "dark"));
  $("help-button").addEventListener("click", help);
  $("panel").addEventListener("close", () => { state.open = null; hush(); remember(); });
  $("table").addEventListener("scroll", rows, { passive: true });
  addEventListener("resize", rows);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target === $("search") && event.key === "Escape") { $("search").value = state.query = ""; arrange(); $("search").blur(); return; }
    if (event.target.matches("input, select")) return;
    const key = { ArrowDown: event.target.closest(".row.body") && "j", ArrowUp: event.target.closest(".row.body") && "k", ArrowRight: $("panel").open && "j", ArrowLeft: $("panel").open && "k" }[event.key] || event.key;
    const act = KEYS.find(([name]) => name === key)?.[2];
    if (act && !event.defaultPrevented) { event.preventDefault(); act(); }
  });
  if (!report.live) return;
  $("follow-label").hidden = false;
  $("follow").checked = stored("recorders-follow") === "1";
  $("follow").addEventListener("change", () => stored("recorders-follow", $("follow").checked ? "1" : "0"));
  setInterval(() => { if ($("follow").checked && !$("panel").open) location.reload(); }, 10_000);
}

async function start() {
  await unpack();
  layered = charts.filter((chart) => !chart.overall && hasNumbers(chart));
  const overall = charts.filter((chart) => chart.overall && hasNumbers(chart)), kept = new URLSearchParams(location.hash.slice(1));
  collect();
  showSummary();
  showFindings();
  sorts();
  $("heat").classList.toggle("pairs", runs.length > 1);
  $("overall").replaceChildren(...overall.map(overallCard));
  heats.push(...layered.map((chart) => heatCard(chart, openPanel, () => state.order)));
  $("heat").replaceChildren(...heats.map(({ card }) => card));
  $("overall-section").hidden = !overall.length;
  $("heat-section").hidden = $("layers-section").hidden = !layered.length;
  $("search").value = state.query = kept.get("q") ?? "";
  const asked = layers.indexOf(kept.get("layer"));
  listen();
  theme(stored("recorders-theme"));
  sortBy([...$("sort").options].some((option) => option.value === kept.get("sort")) ? kept.get("sort") : "network", kept.has("down"));
  if (asked >= 0) openPanel(asked);
  performance.mark("ready");
  document.documentElement.dataset.ready = "yes";
}
start();
