// Charts: cards of lines and heat maps, drawn when they come into view. Text from outside is put in as text, never as markup.

const $ = (id) => document.getElementById(id);
const RUN = ["first", "second"];
const nameOf = (run) => run.name || "this run";
const caption = (run, tag = "figcaption") => runs.length > 1 ? element(tag, { class: RUN[runs.indexOf(run)] }, nameOf(run)) : null;

/** An element with attributes, listeners (`onclick: function`) and children; strings become text, null is left out. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Canvases are drawn when they come into view, and again if their width or the theme changes.

const drawers = new WeakMap(), drawn = new Map();
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) if (isIntersecting) draw(target); else drawn.delete(target);
}, { rootMargin: "200px" });
const sized = new ResizeObserver((entries) => {
  for (const { target } of entries) if (drawn.has(target) && drawn.get(target) !== target.clientWidth) draw(target);
});

function canvasOf(attributes, drawer) {
  const canvas = element("canvas", attributes);
  drawers.set(canvas, () => drawer(canvas));
  seen.observe(canvas);
  sized.observe(canvas);
  return canvas;
}
function draw(canvas) {
  drawn.set(canvas, canvas.clientWidth);
  drawers.get(canvas)();
}
/** Draws every canvas: on paper all are in view. */
function drawAll() {
  for (const canvas of document.querySelectorAll("canvas")) if (drawers.has(canvas) && canvas.clientWidth) draw(canvas);
}
function redraw() {
  colours.clear();
  for (const canvas of [...drawn.keys()]) if (canvas.isConnected) draw(canvas); else drawn.delete(canvas);
}

/** Shows a text beside the pointer, or beside a canvas. */
function tell(text, event, canvas) {
  const tip = $("tip"), box = canvas.getBoundingClientRect(), at = event ?? { clientX: box.left + 160, clientY: box.top };
  tip.textContent = text;
  tip.hidden = false;
  (canvas.closest("dialog") ?? document.body).append(tip);  // above a dialog only what is in it can be seen
  tip.style.left = `${Math.max(4, Math.min(at.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(at.clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
}
function hush() { $("tip").hidden = true; }

/**
 * A canvas that tells its values under the pointer, and at a place that arrow keys move. A place is [row, index of a tick].
 * `paint(canvas, place, from)` draws and returns {at: (x, y) => place}; `say(place)` is the text; `choose(place)` is a click or Enter;
 * `range(from, to)` gets the places between which the pointer was dragged, or at which Enter was pressed.
 */
function reader(attributes, [height, width], paint, say, choose, range) {
  let geometry, place = null, from = null;
  const canvas = canvasOf({ tabindex: 0, ...attributes }, () => { geometry = paint(canvas, place, from); });
  const point = (next, event) => {
    place = next;
    draw(canvas);
    if (place) tell(say(place), event, canvas); else hush();
  };
  const inside = (value, size) => Math.max(0, Math.min(size - 1, value));
  canvas.addEventListener("pointermove", (event) => { if (geometry) point(geometry.at(event.offsetX, event.offsetY), event); });
  canvas.addEventListener("pointerdown", (event) => {
    if (!range || !geometry || event.button) return;
    canvas.setPointerCapture(event.pointerId);
    from = geometry.at(event.offsetX, event.offsetY);
  });
  const finish = () => {
    const begun = from;
    from = null;
    if (begun && place && begun[1] !== place[1]) range(...[begun, place].sort((a, b) => a[1] - b[1]));
  };
  const mark = () => {
    if (from) finish(); else from = place;
    draw(canvas);
  };
  canvas.addEventListener("pointerup", finish);
  canvas.addEventListener("pointerleave", () => { from = null; point(null); });
  canvas.addEventListener("blur", () => { from = null; point(null); });
  canvas.addEventListener("click", () => { if (place) choose?.(place); });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const enter = choose ?? (range && mark);
    if (!height || !width || !(move ? move[1] || height > 1 : event.key === "Enter" && enter && place)) return;
    event.preventDefault();
    event.stopPropagation();
    if (!move) enter(place);
    else point(place ? [inside(place[0] + move[0], height), inside(place[1] + move[1], width)] : [0, width - 1]);
  });
  return canvas;
}

/** A title, the unit, and the choice of a logarithmic axis, which all cards of the chart share. */
function head(chart, ...rest) {
  const unit = chart.unit === chart.title.toLowerCase() ? "" : chart.unit;
  const choose = (event) => { chart.chosen = event.target.checked; changed(); };
  const box = element("input", { type: "checkbox", class: "log", "data-chart": charts.indexOf(chart), checked: isLog(chart), onchange: choose });
  const scale = element("label", { class: "unit" }, box, " log scale");
  return element("div", { class: "head" }, element("h3", {}, chart.title), element("span", { class: "unit" }, unit), scale, ...rest);
}

/** Draws everything again, after another range of ticks or another axis was chosen. */
function changed() {
  axes.clear();
  for (const box of document.querySelectorAll("input.log")) box.checked = isLog(charts[box.dataset.chart]);
  for (const heat of heats) heat.show();
  redraw();
  $("whole").hidden = !zoom;
  remember();
}
function zoomTo(first, end) {
  zoom = first < end ? [first, end] : null;
  changed();
}

function legend(entries, figures) {
  const items = entries.map(({ text, ...key }) =>
    element("li", {}, canvasOf({ "aria-hidden": "true" }, (canvas) => drawKey(canvas, key)), text));
  if (figures.some((figure) => figure.bad.length)) items.push(element("li", { class: "bad" }, "\u25b2 NaN or infinite values"));
  for (const { kind, tick, text, style } of figures.flatMap((figure) => figure.marks)) {
    items.push(element("li", { class: style, title: text }, `\u2506 ${kind || "a finding"} since ${axisName} ${tick}`));
  }
  return element("ul", { class: "legend" }, ...items);
}

function lineCanvas(figure, label) {
  const say = ([, at]) => {
    const values = figure.lines.filter(({ values }) => values.length).map(({ name, values, from }) =>
      `${name}: ${shown(values[at])}${layers[from?.[at]] === undefined ? "" : `, ${layers[from[at]]}`}`);
    const found = figure.marks.filter((mark) => mark.at === at).map(({ text }) => text);
    return [`${axisName} ${figure.ticks[at]}`, ...values, ...(figure.bad.includes(at) ? ["values were NaN or infinite"] : []), ...found].join("\n");
  };
  const whole = [label, ...figure.marks.map(({ text }) => text)].join(". ");
  return reader({ role: "img", "aria-label": whole, class: "lines" }, [1, figure.ticks.length],
    (canvas, place, from) => drawLines(canvas, figure, place?.[1], from?.[1]), say, undefined,
    ([, from], [, to]) => zoomTo(figure.ticks[from], figure.ticks[to]));
}

/** The first and the last tick of all runs. */
function span() {
  const ends = runs.flatMap((run) => run.ticks.length ? [run.ticks[0], run.ticks.at(-1)] : []);
  return ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
}

/** The findings on a layer in one run that tell since when, each with the place of that tick and the style of its severity. */
function marksOf(run, layer) {
  return (told.get(layers[layer]) ?? []).filter((one) => one.run === run && one.since !== null).map(({ since, kind, severity, what }) =>
    ({ tick: since, at: run.ticks.findLastIndex((tick) => tick <= since), kind, text: `${severity}: ${what}`, style: severity === "warning" ? "warn" : "bad" }));
}

/** A figure of one layer in one run. Lines that the chart does not draw are there for the text at the pointer. */
function layerFigure(chart, run, layer) {
  const order = [...Object.keys(BANDS).filter((name) => chart.ranges.includes(name)), ...chart.ranges.filter((name) => !BANDS[name])];
  const bands = order.map((name) => [name, band(chart, run, layer, name)]).filter(([, ends]) => ends).map(([name, ends]) => {
    const [tone, alpha] = BANDS[name] ?? ["--other", 0.2];
    return { ...ends, text: name === "std" ? "mean \u00b1 std" : name.replace("-", " to "), colour: tone, alpha };
  });
  const lines = statisticsOf(chart).map((name) =>
    ({ name, values: series(chart, run, layer, name), colour: `--${name}`, hidden: !chart.lines.includes(name) }));
  return { ticks: run.ticks, span: span(), bands, bad: badAt(chart, run, layer), marks: marksOf(run, layer), lines };
}

const axes = new Map();
/** The value axis of a layer's figures in all runs; one for all layers if the chart shares it. */
function axisOf(chart, layer) {
  const key = chart.shared ? chart : `${chart.title}/${layer}`;
  if (!axes.has(key)) {
    const figures = (chart.shared ? chart.layers : [layer]).flatMap((one) => runs.map((run) => layerFigure(chart, run, one)));
    axes.set(key, axis(chart, figures));
  }
  return axes.get(key);
}

/** The figures of a layer in one chart, side by side for two runs. */
function layerCard(chart, layer) {
  const figures = runs.map((run) => ({ ...layerFigure(chart, run, layer), axis: () => axisOf(chart, layer) }));
  const panels = figures.map((figure, r) => {
    const value = shown(last(series(chart, runs[r], layer, lineOf(chart))));
    const label = `${chart.title} of ${layers[layer]}${runs.length > 1 ? ` in ${nameOf(runs[r])}` : ""}: last value ${value}`;
    return element("figure", {}, caption(runs[r]), lineCanvas(figure, label));
  });
  const bands = new Map(figures.flatMap((figure) => figure.bands).map(({ text, colour, alpha }) => [text, { text, colour, alpha }]));
  const keys = [...chart.lines.map((name) => ({ text: name, colour: `--${name}` })), ...bands.values()];
  return element("div", { class: "card" }, head(chart), element("div", { class: "runs" }, ...panels), legend(keys, figures));
}

/** Losses, metrics and the extremes over layers: lines of both runs in one panel; dashes mark the second run. */
function overallCard(chart) {
  const compared = chart.across.length > 0, alone = runs.length === 1;
  const linesOf = (run) => compared ? extremes(chart, run)
    : chart.layers.map((layer) => ({ layer, name: layers[layer], values: series(chart, run, layer, lineOf(chart)) }));
  const lines = runs.flatMap((run, r) => linesOf(run).map((line, k) => ({
    ...line, r, name: alone ? line.name : `${line.name}, ${nameOf(run)}`, colour: PALETTE[k % PALETTE.length], dash: r ? [6, 4] : [],
  }))).filter(({ values }) => last(values) !== undefined);
  // Runs may have other ticks: the figure has the ticks of both, and lines pass by those that they lack.
  const ticks = [...new Set(runs.flatMap((run) => run.ticks))].sort((a, b) => a - b), place = new Map(ticks.map((tick, i) => [tick, i]));
  const placed = (values, r) => {
    const all = new Array(ticks.length).fill(MISSING);
    values?.forEach((value, i) => { all[place.get(runs[r].ticks[i])] = value; });
    return all;
  };
  const bands = compared || !alone ? [] : lines.flatMap((line) =>
    chart.ranges.map((name) => band(chart, runs[0], line.layer, name)).filter(Boolean).map((ends) => ({ ...ends, colour: line.colour, alpha: 0.15 })));
  const bad = compared ? [] : runs.flatMap((run) => chart.layers.flatMap((layer) => badAt(chart, run, layer)).map((i) => place.get(run.ticks[i])));
  const drawn = lines.map((line) => ({ ...line, values: placed(line.values, line.r), from: placed(line.from, line.r) }));
  const marks = compared ? [] : runs.flatMap((run) =>
    chart.layers.flatMap((layer) => marksOf(run, layer)).map((mark) => ({ ...mark, at: place.get(run.ticks[mark.at]) })));
  const figure = { ticks, span: span(), bands, bad: [...new Set(bad)], marks, lines: drawn };
  figure.axis = () => axis(chart, [figure]);
  const keys = lines.map(({ name, colour, dash, values, from }) =>
    ({ text: `${name}: ${shown(last(values))}${from ? `, ${layers[last(from)]}` : ""}`, colour, dash }));
  return element("div", { class: "card" }, head(chart), lineCanvas(figure, `${chart.title} over ${axisName}s`), legend(keys, [figure]));
}

/** Layers by ticks, one heat map for each run, with the same colours; `show` draws those that were chosen, in their order. */
function heatCard(chart, open, chosen) {
  const names = statisticsOf(chart), label = `Statistic of ${chart.title}`;
  const choice = element("select", { "aria-label": label, onchange: () => show() }, ...names.map((name) => element("option", {}, name)));
  const maps = element("div", { class: "runs" }), note = element("p", { class: "note" });
  const card = element("div", { class: "card" }, head(chart, names.length > 1 ? choice : null), maps, note);
  const scales = new Map();
  choice.value = lineOf(chart);
  const show = () => {
    const name = choice.value, common = prefix().length, listed = chosen().filter((layer) => chart.place.has(layer));
    const seen = (run, layer) => series(chart, run, layer, name).subarray(...within(run.ticks));
    const kind = `${name} ${zoom} ${chart.chosen}`;
    if (!scales.has(kind)) scales.set(kind, shades(chart, runs.flatMap((run) => chart.layers.map((layer) => seen(run, layer)))));
    const scale = scales.get(kind);
    const key = canvasOf({ class: "bar", "aria-hidden": "true" }, (canvas) => drawKey(canvas, scale));
    card.hidden = !listed.length;
    maps.replaceChildren(...runs.map((run) => {
      const [first, behind] = within(run.ticks), ticks = run.ticks.slice(first, behind);
      const badOf = (layer) => badAt(chart, run, layer).filter((i) => i >= first && i < behind).map((i) => i - first);
      const markOf = (layer) => marksOf(run, layer).filter(({ at }) => at >= first && at < behind).map((mark) => ({ ...mark, at: mark.at - first }));
      const rows = listed.map((layer) => ({ name: layers[layer].slice(common), values: seen(run, layer), bad: badOf(layer), marks: markOf(layer) }));
      const say = ([row, at]) => `${layers[listed[row]]}\n${axisName} ${ticks[at]}: ${shown(rows[row].values[at])}`
        + (rows[row].bad.includes(at) ? "\nvalues were NaN or infinite" : "")
        + rows[row].marks.filter((mark) => mark.at === at).map(({ text }) => `\n${text}`).join("");
      const where = `${listed.length} layers over ${ticks.length} ${axisName}s${runs.length > 1 ? ` in ${nameOf(run)}` : ""}`;
      const attributes = { role: "application", class: "map", "aria-label": `${chart.title}, ${name}: ${where}. Arrow keys move, Enter opens a layer.` };
      const map = reader(attributes, [listed.length, ticks.length],
        (canvas, place) => drawHeat(canvas, { rows, ticks, shades: scale }, place), say, ([row]) => open(listed[row]));
      map.style.height = `${heatSize(listed.length).height}px`;
      return element("figure", {}, caption(run), element("div", { class: "scroll" }, map));
    }));
    const possible = chart.limits.map((limit) => limit === null ? null : shown(limit)), found = [scale.low, scale.high].map(shown);
    const bounds = possible.every((limit) => limit !== null) && possible.join() !== found.join() ? `, of possible ${possible.join(" to ")}` : "";
    const ends = scale.low < scale.high ? [found[0], key, found[1]] : [`all are ${found[0]}`];
    const since = runs.some((run) => listed.some((layer) => marksOf(run, layer).length)) ? " \u00b7 \u2506 since when something was found" : "";
    note.replaceChildren(...ends, bounds, scale.log && !isLog(chart) ? " (log scale)" : "", since, ...runs.map((run) => wrong(chart, run)));
  };
  return { card, show };
}

/** What the names of all layers begin with, up to a dot; labels leave it out. */
function prefix() {
  const names = [...new Set(charts.filter((chart) => !chart.overall).flatMap((chart) => chart.layers))].map((layer) => layers[layer]);
  return names.length < 2 ? "" : names.reduce((common, name) => {
    while (!name.startsWith(common)) common = common.slice(0, common.lastIndexOf(".", common.length - 2) + 1);
    return common;
  }, names[0].slice(0, names[0].lastIndexOf(".") + 1));
}

/** How many layers had values that were not finite, and which was the first. */
function wrong(chart, run) {
  const found = chart.layers.map((layer) => [badAt(chart, run, layer)[0], layer]).filter(([at]) => at !== undefined);
  if (!found.length) return "";
  const [at, layer] = found.reduce((best, one) => one[0] < best[0] ? one : best);
  const where = `${found.length} ${found.length > 1 ? "layers" : "layer"}${runs.length > 1 ? ` of ${nameOf(run)}` : ""}`;
  return element("span", { class: "bad" }, ` \u00b7 NaN or infinite in ${where}, first in ${layers[layer]} at ${axisName} ${run.ticks[at]}`);
}
