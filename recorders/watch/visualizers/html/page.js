// Page: findings, search, order, the table of layers, the panel of one layer, keys and themes.

const state = { query: "", sort: "network", down: false, order: [], open: null };
const heats = [], told = new Map(), flags = new Map();
let layered = [], inCharts = [];

/** Findings by layer; and of each layer, in each run and in all, at how many ticks values were not finite, and the first of these. */
function collect() {
  for (const run of runs) {
    run.flags = new Map();
    for (const one of run.findings ?? []) told.set(one.layer, [...(told.get(one.layer) ?? []), { ...one, run }]);
    for (const chart of layered) {
      for (const layer of chart.layers) {
        const found = badAt(chart, run, layer);
        for (const map of found.length ? [flags, run.flags] : []) {
          const { count, first } = map.get(layer) ?? { count: 0, first: Infinity };
          map.set(layer, { count: Math.max(count, found.length), first: Math.min(first, run.ticks[found[0]]) });
        }
      }
    }
  }
}

function layerButton(name) {
  const layer = layers.indexOf(name);
  if (!inCharts.includes(layer)) return element("b", {}, name);
  return element("button", { type: "button", class: "link", onclick: () => openPanel(layer) }, name);
}

/** A card of layers, each with what was found; only the first ones are in view. */
function findingCard({ items, text, severity, page }) {
  const line = ([layer, what]) => element("li", {}, badge(severity), " ", layerButton(layer), ` ${what}`);
  const shown = items.slice(0, 6).map(line), rest = items.slice(6).map(line);
  const more = rest.length ? element("details", {}, element("summary", {}, `and ${rest.length} more`), element("ul", {}, ...rest)) : null;
  return element("div", { class: `card finding ${severity ?? ""}` }, element("ul", {}, ...shown), more, element("p", {}, text), documented(page));
}

const badge = (severity) => severity ? element("span", { class: `badge ${severity}` }, severity) : null;
/** Where the documentation of a finding is. It is no link: the documentation has no address, and this file may be in any folder. */
const documented = (page) => page ? element("p", { class: "page" }, "See ", element("code", {}, page), " in the repository of torch-recorders.") : null;
const advice = (one) => `${one.why}${one.likely && ` Likely: ${one.likely}.`} Try: ${one.remedy}.`;

function showFindings() {
  const strange = "Heat maps mark values that are not finite in pink, line charts with \u25b2.";
  const boxes = runs.map((run) => {
    const lost = [...run.flags].sort(([a, one], [b, other]) => one.first - other.first || a - b).map(([layer, { first, count }]) =>
      [layers[layer], `NaN or infinite values since ${axisName} ${first}, at ${count} ${axisName}${count > 1 ? "s" : ""}`]);
    const groups = new Map();  // those with the same reason are told together
    for (const one of run.findings ?? []) {
      const key = `${one.severity} ${one.page} ${advice(one)}`, { items = [] } = groups.get(key) ?? {};
      groups.set(key, { items: [...items, [one.layer, one.what]], text: advice(one), severity: one.severity, page: one.page });
    }
    const cards = [...(lost.length ? [{ items: lost, text: strange }] : []), ...groups.values()].map(findingCard);
    const fine = run.examined ? "fine" : "";
    if (!cards.length || !run.findings) cards.push(element("div", { class: `card ${fine}` }, run.verdict));
    return element("div", {}, caption(run, "h3"), ...cards, ...run.notes.map((note) => element("p", { class: "note" }, note)));
  });
  $("findings").replaceChildren(element("div", { class: runs.length > 1 ? "runs" : "" }, ...boxes));
}

function showSummary() {
  const plural = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
  const about = (run) => [
    run.name, plural(run.count, run.axis === "epoch" ? "epoch" : "tick"), run.count > 1 ? `${run.axis === "step" ? "steps " : ""}${run.ticks[0]} to ${run.last}` : "",
    run.every > 1 ? `each point stands for ${run.every} ticks` : "",
  ].filter(Boolean).join(", ");
  const written = `written ${report.made.replace("T", " ").slice(0, 16)} UTC${report.made.slice(19)}`, parts = [plural(inCharts.length, "layer"), ...runs.map(about), written];
  $("summary").textContent = [...parts, ...(report.live ? ["the training goes on"] : [])].join(" \u00b7 ");
}

// Order and search

function sorts() {
  const kinds = [["last", "last value"], ["change", "change over time"], ...(runs.length > 1 ? [["runs", "difference of the runs"]] : [])];
  const option = (value, text) => element("option", { value }, text);
  const groups = layered.map((chart, c) =>
    element("optgroup", { label: chart.title }, ...kinds.map(([kind, text]) => option(`${kind} ${c}`, `${chart.title}: ${text}`))));
  $("sort").replaceChildren(option("network", "network order"), option("name", "name"), option("alarm", "findings first"), ...groups);
}

/** What layers are sorted by; undefined for a layer without it. */
function keyOf(sort) {
  const [kind, c] = sort.split(" "), chart = layered[c], of = (layer, run) => series(chart, run, layer, lineOf(chart));
  const number = (value) => isBad(value) ? Infinity : value;
  const over = (values) => change(values.find((value) => value !== MISSING), last(values));
  const changes = (layer) => runs.map((run) => over(of(layer, run))).filter((value) => value !== undefined);
  return {
    network: (layer) => layer,
    name: (layer) => layers[layer],
    alarm: (layer) => (told.get(layers[layer])?.length ?? 0) * 1e6 + (flags.get(layer)?.count ?? 0),
    last: (layer) => number(last(of(layer, runs[0]))),
    change: (layer) => changes(layer).length ? Math.max(...changes(layer)) : undefined,
    runs: (layer) => change(last(of(layer, runs[0])), last(of(layer, runs[1]))),
  }[kind];
}

/** Applies search and order to the table and the heat maps. Layers without a value come last, in either direction. */
function arrange() {
  const words = state.query.toLowerCase().split(/\s+/), key = keyOf(state.sort), turn = state.down ? -1 : 1;
  const found = inCharts.filter((layer) => words.every((word) => `${layers[layer]} ${kindOf(layer)}`.toLowerCase().includes(word)));
  const keys = new Map(found.map((layer) => [layer, key(layer)]));
  const compare = (x, y) => typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : Number(x > y) - Number(x < y);
  state.order = found.sort((a, b) => {
    const [x, y] = [keys.get(a), keys.get(b)], missing = Number(x === undefined) - Number(y === undefined);
    return missing || (x === undefined ? 0 : turn * compare(x, y)) || a - b;
  });
  $("sort").value = state.sort;
  $("reverse").setAttribute("aria-pressed", state.down);
  $("count").textContent = `${found.length} of ${inCharts.length}`;
  titles();
  rows();
  for (const heat of heats) heat.show();
  remember();
}

/** Sorts; numbers from the largest on, unless `down` says otherwise. */
function sortBy(sort, down = sort !== "network" && sort !== "name") {
  Object.assign(state, { sort, down });
  arrange();
}

// The table: only the rows in view exist.

const ROW = 36, TOP = 52, NAME = 240, CELL = 172;  // pixels

function rowElement(attributes, top, height, ...cells) {
  const row = element("div", { role: "row", ...attributes }, ...cells);
  const columns = `minmax(${NAME}px, 1.4fr) repeat(${layered.length}, minmax(${CELL}px, 1fr))`;
  Object.assign(row.style, { gridTemplateColumns: columns, minWidth: `${NAME + layered.length * CELL}px`, top: `${top}px`, height: `${height}px` });
  return row;
}

function titles() {
  const title = (sort, text, style) => {
    const sorted = state.sort !== sort ? "none" : state.down ? "descending" : "ascending";
    const click = () => sortBy(sort, state.sort === sort ? !state.down : undefined);
    const button = element("button", { type: "button", onclick: click }, `${text} ${{ ascending: "\u25b2", descending: "\u25bc" }[sorted] ?? ""}`);
    return element("div", { role: "columnheader", class: style, "aria-sort": sorted }, button);
  };
  const cells = layered.map((chart, c) => title(`last ${c}`, chart.title)), box = $("table"), height = state.order.length * ROW;
  const space = element("div", { role: "presentation" });
  space.style.height = `${height}px`;
  box.setAttribute("aria-rowcount", state.order.length + 1);
  box.replaceChildren(rowElement({ class: "row titles", "aria-rowindex": 1 }, 0, TOP, title("network", "Layer", "name"), ...cells), space);
  box.style.height = `${Math.min(560, TOP + height + 18)}px`;
  box.scrollTop = 0;
}

function rows() {
  const box = $("table"), start = Math.max(0, Math.floor(box.scrollTop / ROW) - 4);
  const end = Math.min(state.order.length, start + Math.ceil(box.clientHeight / ROW) + 8);
  const kept = new Map([...box.querySelectorAll(".row.body")].map((row) => [Number(row.dataset.at), row]));
  for (const [at, row] of kept) if ((at < start || at >= end) && !row.contains(document.activeElement)) row.remove();
  for (let at = start; at < end; at++) if (!kept.has(at)) box.append(rowOf(state.order[at], at));
}

function rowOf(layer, at) {
  const notes = [...(told.get(layers[layer]) ?? []).map((one) => one.what), ...(flags.has(layer) ? ["NaN or infinite values"] : [])].join("; ");
  const button = element("button", { type: "button", class: "link", title: layers[layer], onclick: () => openPanel(layer) }, layers[layer]);
  const only = !flags.has(layer) && (told.get(layers[layer]) ?? []).every((one) => one.severity === "warning");
  const mark = notes ? element("span", { class: only ? "warn" : "bad", role: "img", title: notes, "aria-label": notes }, "\u25b2") : null;
  const cells = layered.map((chart) => {
    const lines = runs.map((run, r) => ({ values: series(chart, run, layer, lineOf(chart)), colour: runs.length > 1 ? `--${RUN[r]}` : "--mean" }));
    const values = lines.map((line) => last(line.values));
    if (values.every((value) => value === undefined)) return element("div", { role: "cell", class: "figure" }, element("span"), "\u2013");
    const spans = values.map((value, r) => element("span", { class: isBad(value) ? "bad" : runs.length > 1 ? RUN[r] : "" }, shown(value)));
    const spark = canvasOf({ "aria-hidden": "true" }, (canvas) => drawSpark(canvas, lines));
    return element("div", { role: "cell", class: "figure" }, spark, element("span", {}, ...spans));
  });
  const kind = kindOf(layer) ? element("span", { class: "kind" }, kindOf(layer)) : null;
  const name = element("div", { role: "rowheader", class: "name" }, button, kind, mark);
  return rowElement({ class: "row body", "aria-rowindex": at + 2, "data-at": at }, TOP + at * ROW, ROW, name, ...cells);
}

/** Moves the focus by some rows. */
function step(move) {
  const focused = document.activeElement.closest(".row.body"), at = focused ? Number(focused.dataset.at) + move : 0;
  if (at < 0 || at >= state.order.length) return;
  const box = $("table"), top = at * ROW, outside = top < box.scrollTop || top > box.scrollTop + box.clientHeight - TOP - 2 * ROW;
  if (outside) box.scrollTop = Math.max(0, top - box.clientHeight / 2);
  rows();
  box.querySelector(`[data-at="${at}"] .link`).focus();
}

// The panel of one layer

function openPanel(layer) {
  const panel = $("panel"), at = state.order.indexOf(layer);
  state.open = layer;
  hush();
  const button = (id, text, label, onclick, disabled) => element("button", { type: "button", id, "aria-label": label, onclick, disabled }, text);
  const next = (move) => at < 0 || state.order[at + move] === undefined;
  const top = element("div", { class: "bar-top" }, element("h2", { id: "panel-title" }, layers[layer], kindOf(layer) ? element("small", {}, kindOf(layer)) : null),
    button("previous", "\u2190", "Previous layer", () => turn(-1), next(-1)), button("next", "\u2192", "Next layer", () => turn(1), next(1)),
    button("close", "\u2715", "Close", () => panel.close()));
  const found = (told.get(layers[layer]) ?? []).map((one) =>
    element("div", { class: `card finding ${one.severity}` }, caption(one.run, "h3"), badge(one.severity), " ", element("b", {}, one.what), element("p", {}, advice(one)), documented(one.page)));
  panel.replaceChildren(top, ...found, ...layered.filter((chart) => chart.place.has(layer)).map((chart) => layerCard(chart, layer)));
  if (!panel.open) panel.showModal();
  panel.scrollTop = 0;
  remember();
}

function turn(move) {
  const at = state.order.indexOf(state.open), next = state.order[at + move];
  if (at >= 0 && next !== undefined) openPanel(next);
}

// The address remembers the layer, the search and the order; the browser, the theme.

function remember() {
  const { query: q, sort, down, open } = state;
  const kept = { ...(q && { q }), ...(sort !== "network" && { sort }), ...(down && { down }), ...(open !== null && { layer: layers[open] }), ...(zoom && { ticks: zoom.join(" ") }) };
  history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
}
function stored(key, value) {
  try {
    return value === undefined ? localStorage.getItem(key) : localStorage.setItem(key, value);
  } catch {
    return null;  // the browser keeps nothing for this page
  }
}

function dark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
function theme(name) {
  if (name) {
    document.documentElement.dataset.theme = name;
    stored("recorders-theme", name);
  }
  $("theme").textContent = dark() ? "Light" : "Dark";
  redraw();
}

const KEYS = [
  ["/", "search layers", () => $("search").focus()],
  ["j", "next layer, in the table or the panel", () => $("panel").open ? turn(1) : step(1)],
  ["k", "previous layer", () => $("panel").open ? turn(-1) : step(-1)],
  ["Enter", "open the layer that has the focus"],
  ["Esc", "close the panel; clear the search"],
  ["s", "choose the order", () => $("sort").focus()],
  ["d", "reverse the order", () => sortBy(state.sort, !state.down)],
  ["f", "findings", () => $("h-findings").scrollIntoView()],
  ["h", "heat maps", () => $("h-heat").scrollIntoView()],
  ["l", "table of layers", () => $("h-layers").scrollIntoView()],
  ["0", "all ticks again, after some were chosen by dragging over a line chart", () => zoomTo()],
  ["t", "dark or light", () => theme(dark() ? "light" : "dark")],
  ["r", "while the training goes on: open again every 10 seconds", () => report.live && $("follow").click()],
  ["?", "this list", () => help()],
  ["arrows", "on a chart: tick by tick; on a heat map also layer by layer; on a line chart, Enter at two ticks shows what is between"],
];

function help() {
  const panel = $("help"), rows = KEYS.map(([key, text]) =>
    element("tr", {}, element("th", { scope: "row" }, element("kbd", {}, key)), element("td", {}, text)));
  const close = element("button", { type: "button", onclick: () => panel.close() }, "Close");
  panel.replaceChildren(element("h2", { id: "help-title" }, "Keyboard"), element("table", {}, ...rows), close);
  if (panel.open) panel.close(); else panel.showModal();
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.target === $("search") && event.key === "Escape") {
    $("search").value = state.query = "";
    $("search").blur();
    arrange();
  }
  if (event.target.matches("input, select")) return;
  const inTable = event.target.closest(".row.body"), inPanel = $("panel").open;
  const arrow = { ArrowDown: inTable && "j", ArrowUp: inTable && "k", ArrowRight: inPanel && "j", ArrowLeft: inPanel && "k" }[event.key];
  const act = KEYS.find(([key]) => key === (arrow || event.key))?.[2];
  if (!act) return;
  event.preventDefault();
  act();
}

function listen() {
  $("search").addEventListener("input", () => { state.query = $("search").value; arrange(); });
  $("sort").addEventListener("change", () => sortBy($("sort").value));
  $("reverse").addEventListener("click", () => sortBy(state.sort, !state.down));
  $("whole").addEventListener("click", () => zoomTo());
  $("theme").addEventListener("click", () => theme(dark() ? "light" : "dark"));
  $("help-button").addEventListener("click", help);
  $("panel").addEventListener("close", () => { state.open = null; hush(); remember(); });
  $("table").addEventListener("scroll", rows, { passive: true });
  addEventListener("resize", rows);
  addEventListener("beforeprint", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme());
  document.addEventListener("keydown", pressed);
  if (!report.live) return;
  $("follow-label").hidden = false;
  $("follow").checked = stored("recorders-follow") === "1";
  $("follow").addEventListener("change", () => stored("recorders-follow", Number($("follow").checked)));
  setInterval(() => { if ($("follow").checked && !$("panel").open) location.reload(); }, 10_000);
}

async function start() {
  const kept = new URLSearchParams(location.hash.slice(1)), [first, end] = (kept.get("ticks") ?? "").split(" ").map(Number);
  if (first < end) zoom = [first, end];
  await unpack();
  layered = charts.filter((chart) => !chart.overall && hasNumbers(chart));
  inCharts = [...new Set(layered.flatMap((chart) => chart.layers))].sort((a, b) => a - b);
  const overall = charts.filter((chart) => chart.overall && hasNumbers(chart)).sort((a, b) => a.across.length - b.across.length);
  collect();
  showSummary();
  showFindings();
  sorts();
  heats.push(...layered.map((chart) => heatCard(chart, openPanel, () => state.order)));
  $("overall").replaceChildren(...overall.map(overallCard));
  $("heat").replaceChildren(...heats.map(({ card }) => card));
  $("heat").classList.toggle("pairs", runs.length > 1);
  $("overall-section").hidden = !overall.length;
  $("heat-section").hidden = $("layers-section").hidden = !layered.length;
  $("search").value = state.query = kept.get("q") ?? "";
  listen();
  theme(stored("recorders-theme"));
  $("whole").hidden = !zoom;
  const sort = kept.get("sort") ?? "network", layer = layers.indexOf(kept.get("layer"));
  sortBy([...$("sort").options].some((option) => option.value === sort) ? sort : "network", kept.has("down"));
  if (inCharts.includes(layer)) openPanel(layer);
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));  // what is in view is drawn by then
  performance.mark("ready");
  document.documentElement.dataset.ready = "yes";
}
start();
