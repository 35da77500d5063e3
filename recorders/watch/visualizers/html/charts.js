// Charts: cards of findings, lines and heat maps. All text from outside is put in as text, never as markup.

const $ = (id) => document.getElementById(id);
const RUN = ["--first", "--second"];
const nameOf = (run) => run.name || "this run";

/** An element with attributes, listeners (`onclick: function`) and children; strings become text. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Canvases are drawn when they come into view, and again if their size or the theme changes.
const drawers = new WeakMap();
const seen = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => { if (isIntersecting) draw(target); else drawn.delete(target); }), { rootMargin: "200px" });
const sized = new ResizeObserver((entries) => entries.forEach(({ target }) => { if (drawn.has(target) && drawn.get(target) !== target.clientWidth) draw(target); }));
const drawn = new Map();
function draw(canvas) { drawn.set(canvas, canvas.clientWidth); drawers.get(canvas)?.(); }
function redraw() {
  colours.clear();
  for (const canvas of [...drawn.keys()]) if (canvas.isConnected) draw(canvas); else drawn.delete(canvas);
}
function canvasOf(attributes, drawer) {
  const canvas = element("canvas", attributes);
  drawers.set(canvas, () => drawer(canvas));
  seen.observe(canvas); sized.observe(canvas);
  return canvas;
}

function tell(text, event, canvas) {
  const tip = $("tip"), box = canvas.getBoundingClientRect(), at = event ?? { clientX: box.left + 160, clientY: box.top };
  tip.textContent = text;
  tip.hidden = !text;
  (canvas.closest("dialog") ?? document.body).append(tip);
  tip.style.left = `${Math.max(4, Math.min(at.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(at.clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
}
function hush() { $("tip").hidden = true; }

/** A line chart that points at the tick under the pointer, or the one chosen with the arrow keys. */
function lineCanvas(figure, label) {
  let geometry, cursor;
  const canvas = canvasOf({ role: "img", tabindex: 0, "aria-label": label, class: "lines" }, () => { geometry = drawLines(canvas, figure, cursor); });
  canvas.style.height = "190px";
  const point = (at, event) => {
    cursor = at;
    draw(canvas);
    if (at === undefined) return hush();
    const values = figure.lines.filter(({ values }) => values.length).map(({ name, values, from }) => `${name}: ${shown(values[at])}${from?.[at] !== undefined ? `, ${layers[from[at]]}` : ""}`);
    tell([`tick ${figure.ticks[at]}`, ...values, ...(figure.bad.includes(at) ? ["values were NaN or infinite"] : [])].join("\n"), event, canvas);
  };
  canvas.addEventListener("pointermove", (event) => { if (geometry && figure.ticks.length) point(geometry.nearest(event.offsetX), event); });
  canvas.addEventListener("pointerleave", () => point());
  canvas.addEventListener("blur", () => point());
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !figure.ticks.length) return;
    event.preventDefault(); event.stopPropagation();
    point(Math.max(0, Math.min(figure.ticks.length - 1, (cursor ?? (move > 0 ? -1 : figure.ticks.length)) + move)));
  });
  return canvas;
}

function legend(entries) {
  return element("ul", { class: "legend" }, ...entries.map(({ text, ...key }) => element("li", {}, canvasOf({ "aria-hidden": "true" }, (canvas) => drawKey(canvas, key)), text)));
}
const bandText = (range) => range === "std" ? "mean \u00b1 std" : range.replace("-", " to ");
const badText = (figures) => figures.some((figure) => figure.bad.length) ? element("li", { class: "bad" }, "\u25b2 NaN or infinite values") : null;
const span = () => { const all = runs.flatMap((run) => run.ticks.length ? [run.ticks[0], run.ticks.at(-1)] : []); return all.length ? [Math.min(...all), Math.max(...all)] : [0, 1]; };

/** A figure of one layer in one run: bands, lines, and where values were not finite. */
function layerFigure(chart, run, layer) {
  const bands = Object.keys(BANDS).concat(chart.ranges.filter((name) => !BANDS[name])).filter((name) => chart.ranges.includes(name)).map((name) => {
    const [tone, alpha] = BANDS[name] ?? ["--other", 0.2], ends = band(chart, run, layer, name);
    return ends && { ...ends, name, colour: tone, alpha };
  }).filter(Boolean);
  const names = statisticsOf(chart).filter((name) => chart.lines.includes(name) || name !== "std");
  const lines = names.map((name) => ({ name, values: series(chart, run, layer, name), colour: `--${name}`, hidden: !chart.lines.includes(name) }));
  return { ticks: run.ticks, span: span(), bands, bad: badAt(chart, run, layer), lines, arrays: [...lines.filter((line) => !line.hidden).map((line) => line.values), ...bands.flatMap(({ low, high }) => [low, high])] };
}

const axes = new Map();
/** The value axis of a layer's figures; one for all layers if the chart shares it. */
function axisOf(chart, layer) {
  const key = chart.shared ? chart : `${chart.title}/${layer}`;
  if (!axes.has(key)) axes.set(key, axis(chart, (chart.shared ? chart.layers : [layer]).flatMap((one) => runs.flatMap((run) => layerFigure(chart, run, one).arrays))));
  return axes.get(key);
}

/** The figures of a layer in one chart, side by side for two runs. */
function layerCard(chart, layer) {
  const figures = runs.map((run) => ({ ...layerFigure(chart, run, layer), axis: axisOf(chart, layer) }));
  const boxes = figures.map((figure, r) => {
    const line = figure.lines.find((one) => !one.hidden) ?? { values: EMPTY };
    const label = `${chart.title} of ${layers[layer]}${runs.length > 1 ? ` in ${nameOf(runs[r])}` : ""}: last value ${shown(last(line.values))}`;
    return element("figure", {}, runs.length > 1 ? element("figcaption", { class: r ? "second" : "first" }, nameOf(runs[r])) : null,
      lineCanvas(figure, label));
  });
  const keys = [...chart.lines.map((name) => ({ text: name, colour: `--${name}` })), ...figures.flatMap(({ bands }) => bands).filter((one, i, all) => all.findIndex((other) => other.name === one.name) === i).map(({ name, colour, alpha }) => ({ text: bandText(name), colour, alpha }))];
  const list = legend(keys);
  list.append(...[badText(figures)].filter(Boolean));
  return element("div", { class: "card" }, head(chart), element("div", { class: "runs" }, ...boxes), list);
}

function head(chart, ...rest) {
  return element("div", { class: "head" }, element("h3", {}, chart.title), element("span", { class: "unit" }, [chart.unit, chart.log ? "log scale" : ""].filter(Boolean).join(", ")), ...rest);
}

/** Losses, metrics and the extremes over layers: lines of both runs in one panel; dashes mark the second run. */
function overallCard(chart) {
  const compared = chart.across.length > 0, parts = runs.map((run, r) => compared
    ? extremes(chart, run).map((line, k) => ({ ...line, k, r }))
    : chart.layers.map((layer, k) => ({ name: layers[layer], values: series(chart, run, layer, lineOf(chart)), k, r, layer })));
  const lines = parts.flat().filter(({ values }) => values.some((value) => value !== MISSING)).map((line) => ({ ...line, colour: PALETTE[line.k % PALETTE.length], dash: line.r ? [6, 4] : [], name: runs.length > 1 ? `${line.name}, ${nameOf(runs[line.r])}` : line.name }));
  // Runs may have other ticks: the figure has the ticks of both, and lines pass by those that they lack.
  const ticks = [...new Set(runs.flatMap((run) => run.ticks))].sort((a, b) => a - b), place = new Map(ticks.map((tick, i) => [tick, i]));
  const placed = (values, r, gap) => { const all = new Array(ticks.length).fill(gap); values.forEach((value, i) => { all[place.get(runs[r].ticks[i])] = value; }); return all; };
  const bands = compared || runs.length > 1 ? [] : lines.flatMap((line) => chart.ranges.map((name) => band(chart, runs[0], line.layer, name)).filter(Boolean).map((ends) => ({ ...ends, colour: line.colour, alpha: 0.15 })));
  const figure = { ticks, span: span(), bands, lines: lines.map((line) => ({ ...line, values: placed(line.values, line.r, MISSING), from: line.from && placed(line.from, line.r) })) };
  figure.bad = compared ? [] : [...new Set(runs.flatMap((run) => chart.layers.flatMap((layer) => badAt(chart, run, layer)).map((i) => place.get(run.ticks[i]))))];
  figure.axis = axis(chart, [...lines.map((line) => line.values), ...bands.flatMap(({ low, high }) => [low, high])]);
  const list = legend(lines.map(({ name, colour, dash, values, from }) => ({ text: `${name}: ${shown(last(values))}${from ? `, ${layers[last(from)] ?? ""}` : ""}`, colour, dash })));
  list.append(...[badText([figure])].filter(Boolean));
  return element("div", { class: "card" }, head(chart), lineCanvas(figure, `${chart.title} over ticks`), list);
}

/** Layers by ticks, one heat map a run with the same colours; follows the search and the order of the table. */
function heatCard(chart, open, chosen) {
  const names = statisticsOf(chart), choice = element("select", { "aria-label": `Statistic of ${chart.title}` }, ...names.map((name) => element("option", {}, name)));
  choice.value = lineOf(chart);
  const maps = element("div", { class: "runs" }), note = element("p", { class: "note" });
  const show = () => {
    const name = choice.value, colours = shades(chart, runs.flatMap((run) => chart.layers.map((layer) => series(chart, run, layer, name))));
    const common = prefix().length, listed = chosen().filter((layer) => chart.place.has(layer));
    maps.replaceChildren(...runs.map((run, r) => {
      let geometry, cursor = null;
      const heat = { shades: colours, ticks: run.ticks, rows: listed.map((layer) => ({ layer, name: layers[layer].slice(common), values: series(chart, run, layer, name), bad: chart.across.length ? [] : badAt(chart, run, layer) })) };
      const label = `${chart.title}, ${name}: ${listed.length} layers over ${run.ticks.length} ticks${runs.length > 1 ? ` in ${nameOf(run)}` : ""}. Arrow keys move, Enter opens a layer.`;
      const canvas = canvasOf({ role: "application", tabindex: 0, "aria-label": label, class: "map" }, () => { geometry = drawHeat(canvas, heat, cursor); });
      const point = (at, event) => {
        cursor = at;
        draw(canvas);
        if (!at) return hush();
        const row = heat.rows[at[0]];
        tell(`${layers[row.layer]}\ntick ${run.ticks[at[1]]}: ${shown(row.values[at[1]])}${row.bad.includes(at[1]) ? "\nvalues were NaN or infinite" : ""}`, event, canvas);
      };
      canvas.addEventListener("pointermove", (event) => { if (geometry) point(geometry.at(event.offsetX, event.offsetY), event); });
      canvas.addEventListener("pointerleave", () => point(null));
      canvas.addEventListener("blur", () => point(null));
      canvas.addEventListener("click", () => { if (cursor) open(heat.rows[cursor[0]].layer); });
      canvas.addEventListener("keydown", (event) => {
        const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
        if (event.key === "Enter" && cursor) return open(heat.rows[cursor[0]].layer);
        if (!move || !listed.length || !run.ticks.length) return;
        event.preventDefault();
        const [row, tick] = cursor ?? [0, run.ticks.length - 1];
        point(cursor ? [Math.max(0, Math.min(listed.length - 1, row + move[0])), Math.max(0, Math.min(run.ticks.length - 1, tick + move[1]))] : [row, tick]);
      });
      return element("figure", {}, runs.length > 1 ? element("figcaption", { class: r ? "second" : "first" }, nameOf(run)) : null, element("div", { class: "scroll" }, canvas));
    }));
    note.replaceChildren(shown(colours.low), canvasOf({ class: "bar", "aria-hidden": "true" }, (canvas) => drawKey(canvas, { map: colours.map })), shown(colours.high), colours.log && !chart.log ? " (log scale)" : "", ...wrong(chart));
  };
  choice.addEventListener("change", show);
  return { card: element("div", { class: "card" }, head(chart, names.length > 1 ? choice : null), maps, note), show };
}

/** What the names of all layers begin with, up to a dot; labels leave it out. */
function prefix() {
  const names = charts.filter((chart) => !chart.overall).flatMap((chart) => chart.layers).map((layer) => layers[layer]);
  if (new Set(names).size < 2) return "";
  return names.reduce((common, name) => {
    while (!name.startsWith(common)) common = common.slice(0, common.lastIndexOf(".", common.length - 2) + 1);
    return common;
  }, names[0].slice(0, names[0].lastIndexOf(".") + 1));
}

/** How many layers had values that were not finite, and which was the first. */
function wrong(chart) {
  if (chart.across.length) return [];
  return runs.flatMap((run) => {
    const found = chart.layers.map((layer) => [badAt(chart, run, layer)[0], layer]).filter(([at]) => at !== undefined);
    if (!found.length) return [];
    const [at, layer] = found.reduce((best, one) => one[0] < best[0] ? one : best);
    return [element("span", { class: "bad" }, ` \u00b7 NaN or infinite in ${found.length} ${found.length > 1 ? "layers" : "layer"}${runs.length > 1 ? ` of ${nameOf(run)}` : ""}, first in ${layers[layer]} at tick ${run.ticks[at]}`)];
  });
}
