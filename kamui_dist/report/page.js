// The page is whole without this: it adds a reading under the pointer, and zoom. Text goes in by textContent only.
"use strict";
const FIGURES = [...document.querySelectorAll("script.data")].map((s) => ({ ...JSON.parse(s.textContent), svg: s.previousElementSibling }));
const SVG = "http://www.w3.org/2000/svg";
const WHOLE = FIGURES.length ? FIGURES[0].x : [0, 1];
let shown = WHOLE;
const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip";

function add(parent, name, attributes, text) {
  const made = parent.appendChild(document.createElementNS(SVG, name));
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function short(value, digits = 4) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  for (const [factor, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (size >= factor) return String(Number((value / factor).toPrecision(digits))) + suffix;
  return size < 1e-3 ? value.toExponential(2).replace(/\.?0*e/, "e") : String(Number(value.toPrecision(digits)));
}

function ticks(low, high, count, log) {
  if (log && high / low > 20) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), found = [];
    const every = Math.ceil((last - first + 1) / count), factors = high / low < 300 ? [1, 2, 5] : [1];
    for (let d = first; d <= last; d++) if (d % every === 0) for (const m of factors) found.push(m * 10 ** d);
    return found.filter((t) => t >= low * (1 - 1e-9) && t <= high * (1 + 1e-9));
  }
  const raw = (high - low) / count, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= 0.75 * raw), found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12); k++) found.push(k * step);
  return found;
}

const scaleX = (figure) => (x) => figure.left + ((x - shown[0]) / (shown[1] - shown[0])) * (figure.right - figure.left);

function scaleY(panel, [low, high]) {
  const { top, bottom, log } = panel, a = log ? Math.log10(low) : low, b = log ? Math.log10(high) : high;
  return (y) => bottom - ((log ? Math.log10(Math.max(y, low)) : y) - a) / (b - a) * (bottom - top);
}

// First place in the ascending `xs` that is not below x.
function search(xs, x) {
  let low = 0, high = xs.length;
  while (low < high) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid + 1; else high = mid; }
  return low;
}

function range(panel) {
  if (shown === WHOLE) return panel.y;
  let low = Infinity, high = -Infinity;
  const sums = [];
  for (const line of panel.lines) {
    if (line.style === "rug") continue;
    const end = Math.min(line.x.length, search(line.x, shown[1]) + 1);
    for (let k = Math.max(0, search(line.x, shown[0]) - 1); k < end; k++) {
      let y = line.y[k];
      if (panel.stacked) y = sums[k] = (sums[k] || 0) + (y || 0);
      if (y === null || (panel.log && y <= 0)) continue;
      low = Math.min(low, y); high = Math.max(high, y);
    }
  }
  if (low > high) return panel.y;
  if (panel.log) return [low / 1.05, high * 1.05];
  if (panel.zero) low = Math.min(0, low);
  const air = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
  return [panel.zero && low === 0 ? 0 : low - air, high + air];
}

function path(line, X, Y, bottom) {
  let d = "", pen = "M";
  for (let k = 0; k < line.x.length; k++) {
    if (line.style === "rug") { d += `M${X(line.x[k]).toFixed(1)} ${bottom}v-8`; continue; }
    if (line.y[k] === null) { pen = "M"; continue; }
    const at = `${X(line.x[k]).toFixed(1)} ${Y(line.y[k]).toFixed(1)}`;
    d += line.style === "dots" ? `M${at}h0` : pen + at;
    pen = "L";
  }
  return d;
}

function areas(panel, X, Y) {
  const xs = panel.lines[0].x.map(X), last = xs.length - 1;
  let base = xs.map(() => 0);
  const steps = (ys) => xs.flatMap((x, k) => {
    const y = Y(ys[k]).toFixed(1), left = k ? (xs[k - 1] + x) / 2 : x, right = k < last ? (x + xs[k + 1]) / 2 : x;
    return [`${left.toFixed(1)} ${y}`, `${right.toFixed(1)} ${y}`];
  });
  return panel.lines.map((line) => {
    const top = base.map((b, k) => b + (line.y[k] || 0)), points = steps(top).concat(steps(base).reverse());
    base = top;
    return `M${points.join("L")}Z`;
  });
}

function draw(figure) {
  const X = scaleX(figure), { svg } = figure;
  const ys = svg.querySelectorAll("g.y"), plots = svg.querySelectorAll("g.plot");
  figure.panels.forEach((panel, p) => {
    const span = range(panel), Y = scaleY(panel, span);
    ys[p].replaceChildren();
    for (const t of ticks(...span, panel.ticks, panel.log)) {
      add(ys[p], "path", { class: "grid", d: `M${figure.left} ${Y(t).toFixed(1)}H${figure.right}` });
      add(ys[p], "text", { class: "tick", x: figure.left - 7, y: Y(t) + 4, "text-anchor": "end" }, short(t));
    }
    const drawn = panel.stacked ? areas(panel, X, Y) : panel.lines.map((line) => path(line, X, Y, panel.bottom));
    [...plots[p].children].forEach((child, k) => child.setAttribute("d", drawn[k]));
  });
  const axis = svg.querySelector("g.x");
  axis.replaceChildren();
  for (const t of ticks(...shown, 8, false)) {
    add(axis, "path", { class: "grid", d: `M${X(t).toFixed(1)} ${figure.bottom}v5` });
    add(axis, "text", { class: "tick", x: X(t).toFixed(1), y: figure.bottom + 18, "text-anchor": "middle" }, short(t, 6));
  }
  const top = figure.panels[0].top, taken = [-1e9, -1e9];
  for (const mark of svg.querySelectorAll(".mark")) {
    const x = X(Number(mark.dataset.x)), end = X(Number(mark.dataset.end ?? NaN)), inside = x >= figure.left - 1 && x <= figure.right + 1;
    mark.setAttribute("transform", `translate(${x.toFixed(1)} 0)`);
    mark.setAttribute("visibility", inside ? "visible" : "hidden");
    mark.querySelector(".band")?.setAttribute("width", Math.max(0, Math.min(end, figure.right) - x).toFixed(1));
    const badge = mark.querySelector(".badge");
    if (!badge) continue;
    const row = inside ? taken.findIndex((until) => x - 9 > until) : -1;
    badge.setAttribute("visibility", row < 0 ? "hidden" : "inherit");
    if (row < 0) continue;
    taken[row] = x + 9;
    badge.firstElementChild.setAttribute("cy", top - 9 - 16 * row);
    badge.lastElementChild.setAttribute("y", top - 5 - 16 * row);
  }
}

function zoom(to) {
  shown = to;
  FIGURES.forEach(draw);
}

// Place of the pointer in the figure's own units.
function pointer(figure, event) {
  const p = new DOMPoint(event.clientX, event.clientY).matrixTransform(figure.svg.getScreenCTM().inverse());
  const share = (p.x - figure.left) / (figure.right - figure.left);
  return { x: p.x, y: p.y, share, value: shown[0] + share * (shown[1] - shown[0]) };
}

function read(figure, at, event) {
  const panel = figure.panels.find((p) => at.y <= p.bottom + 8) ?? figure.panels.at(-1), Y = scaleY(panel, range(panel));
  let rows = [];
  panel.lines.forEach((line, k) => {
    if (!line.name || line.style === "rug" || line.style === "dots" || !line.x.length) return;
    let place = search(line.x, at.value);
    if (place > 0 && (place === line.x.length || at.value - line.x[place - 1] < line.x[place] - at.value)) place--;
    if (line.y[place] !== null) rows.push({ k, line, x: line.x[place], y: line.y[place] });
  });
  if (rows.length > 9) rows = rows.map((r) => [Math.abs(Y(r.y) - at.y), r]).sort((a, b) => a[0] - b[0]).slice(0, 3).map((r) => r[1]);
  tip.replaceChildren();
  tip.appendChild(document.createElement("b")).textContent = `${document.body.dataset.by} ${Math.round(at.value).toLocaleString("en")}`;
  for (const { k, line, y } of rows) {
    const row = tip.appendChild(document.createElement("div")), swatch = row.appendChild(document.createElement("span"));
    const drawn = figure.svg.querySelectorAll("g.plot")[figure.panels.indexOf(panel)].children[k];
    swatch.className = "sw";
    swatch.style.background = getComputedStyle(drawn)[panel.stacked ? "fill" : "stroke"];
    row.append(`${line.name}: ${short(y, 5)}`);
  }
  tip.style.display = "block";
  const wide = tip.offsetWidth, left = event.clientX + 16 + wide > innerWidth ? event.clientX - wide - 12 : event.clientX + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${event.clientY + 14}px`;
}

function cross(value) {
  for (const figure of FIGURES) {
    figure.cross ??= add(figure.svg, "path", { class: "cross" });
    const x = scaleX(figure)(value);
    figure.cross.setAttribute("d", value === null ? "" : `M${x.toFixed(1)} ${figure.panels[0].top}V${figure.bottom}`);
  }
}

for (const figure of FIGURES) {
  let from = null, box = null;
  figure.svg.addEventListener("pointermove", (event) => {
    const at = pointer(figure, event);
    if (box) {
      const [a, b] = [from.x, at.x].map((x) => Math.min(Math.max(x, figure.left), figure.right)).sort((m, n) => m - n);
      box.setAttribute("x", a);
      box.setAttribute("width", b - a);
    }
    if (at.share < 0 || at.share > 1) { tip.style.display = "none"; cross(null); return; }
    cross(at.value);
    read(figure, at, event);
  });
  figure.svg.addEventListener("pointerleave", () => { tip.style.display = "none"; cross(null); });
  figure.svg.addEventListener("pointerdown", (event) => {
    if (event.button || event.pointerType !== "mouse" || event.target.closest("a")) return;
    event.preventDefault();
    from = pointer(figure, event);
    const top = figure.panels[0].top;
    box = add(figure.svg, "rect", { class: "chosen", x: from.x, width: 0, y: top, height: figure.bottom - top });
  });
  addEventListener("pointerup", (event) => {
    if (!box) return;
    box.remove();
    box = null;
    const [a, b] = [from.value, pointer(figure, event).value].map((v) => Math.min(Math.max(v, shown[0]), shown[1])).sort((m, n) => m - n);
    if (b - a > 0.01 * (shown[1] - shown[0])) zoom([a, b]);
  });
  figure.svg.addEventListener("dblclick", () => zoom(WHOLE));
}

// A finding and its mark light up together.
for (const text of document.querySelectorAll(".finding")) {
  const mark = document.querySelector(`.mark a[href="#${text.id}"]`)?.parentElement;
  if (!mark) continue;
  for (const [one, other] of [[text, mark], [mark, text]]) {
    one.addEventListener("pointerenter", () => { other.classList.add("lit"); });
    one.addEventListener("pointerleave", () => { other.classList.remove("lit"); });
  }
}
