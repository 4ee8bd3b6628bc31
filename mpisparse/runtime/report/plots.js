// One chart of the page: its uPlot, what is drawn around the lines, and the values under the cursor.
"use strict";

const FONT = '11.5px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif';
const DASHES = { evaluation: [5, 4], dense: [5, 4], set: [2, 3] };
const MORE_DASHES = [undefined, [9, 3], [3, 3], [9, 3, 3, 3]]; // of runs beyond the number of colours
const COLOURS = 8;
const DOTTED = 40; // up to this many points are also drawn as dots
const TIP_ROWS = 12;
const BRIEF_ROWS = 4; // lines of a chart whose values are shown while the pointer is on another chart

// A colour as the style sheet has it now, light or dark.
function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function resolved(colour) {
  return colour.startsWith("var(") ? css(colour.slice(4, -1)) : colour;
}

// The same colour, but translucent. A canvas turns every CSS colour into #rrggbb.
const brush = document.createElement("canvas").getContext("2d");
function faint(colour, alpha) {
  brush.fillStyle = colour;
  return brush.fillStyle + Math.round(alpha * 255).toString(16).padStart(2, "0");
}

class Plot {
  // `page` has data, view and what the plots tell it: hovered(plot), zoomed(axis, range).
  constructor(page, mark, element) {
    Object.assign(this, { page, mark, element });
    this.chart = page.data.charts[mark];
    this.log = this.chart.log;
    this.build();
    this.watcher = new ResizeObserver(() => this.resize());
    this.watcher.observe(element);
  }

  build() {
    this.u?.destroy();
    this.lines = linesOf(this.page.data, this.chart, this.page.view);
    const { data, series, bands } = this.contents();
    this.shape = JSON.stringify(series.map(({ label, dash }) => [label, dash]));
    const size = { width: this.element.clientWidth || 360, height: this.element.clientHeight || 240 };
    this.u = new uPlot({ ...size, ...this.options(), series: [{}, ...series], bands }, data, this.element);
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.u.over.append(this.tip);
    this.u.over.addEventListener("mouseenter", () => this.page.hovered(this));
    this.u.over.addEventListener("mouseleave", () => this.page.hovered(null));
  }

  // Take newer data: into the same uPlot if it has the same lines, else into a new one.
  update() {
    this.chart = this.page.data.charts[this.mark];
    this.lines = linesOf(this.page.data, this.chart, this.page.view);
    const { data, series } = this.contents();
    if (JSON.stringify(series.map(({ label, dash }) => [label, dash])) !== this.shape) return this.build();
    const [min, max] = this.page.range(this.chart.along);
    this.u.batch(() => {
      this.u.setData(data, false);
      this.u.setScale("x", { min, max });
    });
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.element;
    if (width && height && (width !== this.u.width || height !== this.u.height)) this.u.setSize({ width, height });
  }

  destroy() {
    this.watcher.disconnect();
    this.u.destroy();
  }

  colour(line) {
    if (line.fixed) return resolved(line.fixed);
    return css(`--c${this.page.place(line) % COLOURS}`);
  }

  dash(line) {
    return DASHES[line.style] || MORE_DASHES[Math.floor(this.page.place(line) / COLOURS) % MORE_DASHES.length];
  }

  // uPlot's data, series and bands. Edges of bands come first, then what is not smoothed, then the lines.
  contents() {
    const shown = (values) => (this.log ? values.map((v) => (v !== null && v <= 0 ? null : v)) : values);
    const columns = [];
    const bands = [];
    const add = (line, values, series) => columns.push({ table: [line.x, shown(values)], series: { label: line.name, ...series } });
    const edge = { stroke: "transparent", width: 0, points: { show: false } };
    if (this.chart.shape === "stack") this.stack(add, bands);
    else if (this.chart.shape === "edges") this.edges(add, bands);
    else if (this.chart.shape === "heat") for (const line of this.lines) add(line, line.y, { ...edge, auto: false });
    else {
      const crowd = this.lines.length > 8 ? 0.07 : 0.17;
      for (const line of this.lines.filter((each) => each.low)) {
        add(line, line.high, edge);
        add(line, line.low, edge);
        bands.push({ series: [columns.length - 1, columns.length], fill: () => faint(this.colour(line), crowd) });
      }
      for (const line of this.lines.filter((each) => each.raw)) {
        add(line, line.raw, { stroke: () => faint(this.colour(line), 0.35), width: 1, points: { show: false } });
      }
      for (const line of this.lines) add(line, line.y, this.looks(line));
    }
    const data = columns.length ? uPlot.join(columns.map((column) => column.table)) : [[]];
    return { data, series: columns.map((column) => column.series), bands };
  }

  looks(line) {
    const stroke = () => this.colour(line);
    const width = line.fixed ? 1.2 : 1.7;
    return { stroke, width, dash: this.dash(line), points: { show: line.x.length <= DOTTED, size: 5, stroke, fill: stroke } };
  }

  // Values that add up: areas between sums.
  stack(add, bands) {
    let below = this.lines.length ? this.lines[0].x.map(() => 0) : [];
    this.lines.forEach((line, i) => {
      below = below.map((sum, j) => sum + (line.y[j] ?? 0));
      const fill = () => this.colour(line);
      add(line, below, { stroke: fill, width: 0.5, points: { show: line.x.length === 1, size: 8, stroke: fill, fill }, fill: i ? undefined : fill });
      if (i) bands.push({ series: [i + 1, i], fill });
    });
  }

  // Areas between neighbouring lines; the lines too, if they are few.
  edges(add, bands) {
    const few = this.lines.length <= 17;
    this.lines.forEach((line, i) => {
      const inner = few && i > 0 && i < this.lines.length - 1;
      const stroke = inner ? () => this.colour(line) : "transparent";
      add(line, line.y, { stroke, width: 1.2, points: { show: inner && line.x.length === 1, stroke, fill: stroke } });
      if (i) bands.push({ series: [i + 1, i], fill: () => faint(this.colour(line), i % 2 ? 0.3 : 0.14) });
    });
  }

  options() {
    const { chart, page } = this;
    const along = page.data.axes[chart.along];
    const soft = () => css("--soft");
    const grid = { stroke: () => css("--grid"), width: 1 };
    const ticks = { stroke: () => css("--grid"), width: 1, size: 4 };
    const axis = (kind, log) => ({
      stroke: soft, font: FONT, labelFont: FONT, ticks, incrs: increments(kind),
      values: (u, splits) => tickLabels(splits, kind, log),
      ...(log ? { splits: (u, i, min, max) => logTicks(min, max, 5), filter: (u, splits) => splits } : {}),
    });
    return {
      padding: [9, 22, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, distr: along.log ? 3 : 1, range: () => page.range(chart.along) },
        y: { distr: this.log ? 3 : 1, range: (u, min, max) => this.reach(min, max) },
      },
      axes: [
        { ...axis(along.kind, along.log), scale: "x", label: along.label, labelSize: 19, labelGap: 1, size: 26, space: 62, grid: { show: false } },
        { ...axis(chart.kind, this.log), scale: "y", space: 34, grid, size: (u, labels) => widest(u, labels) + 14 },
      ],
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false, dist: 4 }, points: { size: 6, show: chart.shape === "lines" },
        bind: { dblclick: () => () => { page.zoomed(chart.along, null); return null; } },
      },
      hooks: {
        drawAxes: [(u) => this.drawBehind(u)],
        draw: [(u) => this.drawCrosses(u)],
        setCursor: [() => this.cursorMoved()],
        setSelect: [(u) => this.selected(u)],
      },
    };
  }

  // The range of the y axis: levels and some room included; from zero if the values come near it.
  reach(low, high) {
    const { chart, log } = this;
    if (chart.shape === "heat") return [0, chart.heat.most];
    if (low === null || high === null || low === undefined) return log ? [0.1, 1] : [0, 1];
    const whole = !this.page.view.zoom[chart.along];
    if (chart.cut && whole && chart.cut < high) high = chart.cut;
    for (const [value] of chart.levels) [low, high] = log && value <= 0 ? [low, high] : [Math.min(low, value), Math.max(high, value)];
    if (log) return high / low < 1.2 ? [low / 1.5, high * 1.5] : [low / (high / low) ** 0.05, high * (high / low) ** 0.05];
    if (chart.shape !== "lines") return [0, (high || 1) * (chart.shape === "stack" ? 1.05 : 1)];
    if (high - low <= 1e-9 * Math.abs(high)) return high ? [low - 0.1 * Math.abs(low), high + 0.1 * Math.abs(high)] : [0, 1];
    const room = 0.05 * (high - low);
    return [low >= 0 && low <= 0.35 * high ? 0 : low - room, high + room];
  }

  selected(u) {
    if (u.select.width < 4) return;
    const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.page.zoomed(this.chart.along, range);
  }

  // Draw inside the frame: everything is clipped to it.
  inside(u, draw) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    draw(ctx, bbox, uPlot.pxRatio);
    ctx.restore();
  }

  drawBehind(u) {
    this.inside(u, (ctx, box, pixel) => {
      if (this.chart.shape === "heat") drawHeat(u, ctx, this.chart);
      for (const [value, name] of this.chart.levels) drawLevel(u, ctx, value, name, pixel);
      const runs = [...new Set(this.lines.flatMap((line) => line.members || [line.run]))];
      for (const run of runs) this.drawEvents(u, ctx, run, pixel);
    });
  }

  drawEvents(u, ctx, run, pixel) {
    const line = this.lines.find((each) => (each.members || [each.run]).includes(run));
    const { bbox } = u;
    ctx.strokeStyle = faint(line.fixed ? css("--soft") : this.colour(line), 0.7);
    ctx.lineWidth = pixel;
    for (const [kind, height] of [["quiet", 6 * pixel], ["loud", bbox.height]]) {
      ctx.setLineDash(kind === "loud" ? [2 * pixel, 2 * pixel] : []);
      ctx.beginPath();
      for (const value of this.page.data.runs[run].events[kind][this.chart.along]) {
        if (value === null || value < u.scales.x.min || value > u.scales.x.max) continue;
        const x = Math.round(u.valToPos(value, "x", true));
        ctx.moveTo(x, bbox.top + bbox.height);
        ctx.lineTo(x, bbox.top + bbox.height - height);
      }
      ctx.stroke();
    }
  }

  // A cross at the top wherever a value is not finite.
  drawCrosses(u) {
    this.inside(u, (ctx, box, pixel) => {
      for (const line of this.lines.filter((each) => each.bad.length)) {
        ctx.strokeStyle = this.colour(line);
        ctx.lineWidth = 1.4 * pixel;
        ctx.beginPath();
        for (const value of line.bad) {
          const [x, y, arm] = [u.valToPos(value, "x", true), box.top + 6 * pixel, 3 * pixel];
          ctx.moveTo(x - arm, y - arm);
          ctx.lineTo(x + arm, y + arm);
          ctx.moveTo(x + arm, y - arm);
          ctx.lineTo(x - arm, y + arm);
        }
        ctx.stroke();
      }
    });
  }

  cursorMoved() {
    if (!this.tip) return; // uPlot is still being built
    this.showTip();
    this.page.cursorMoved(this);
  }

  // The values at the cursor: with names where the pointer is, and briefly in the other charts.
  showTip() {
    const { left, top } = this.u.cursor;
    const here = this.page.pointer === this;
    const rows = left >= 0 ? this.values(left, top) : [];
    this.tip.hidden = !rows.length || (!here && rows.length > BRIEF_ROWS);
    if (this.tip.hidden) return;
    const { kind, label } = this.page.data.axes[this.chart.along];
    const x = this.u.posToVal(left, "x");
    const head = `${label}: ${kind === "count" ? number(Math.round(x)) : say(x, kind)}`;
    const more = rows.length > TIP_ROWS ? [`… ${rows.length - TIP_ROWS} more`] : [];
    this.tip.className = here ? "tip" : "tip brief";
    this.tip.replaceChildren(...(here ? [head] : []), ...rows.slice(0, TIP_ROWS).map(tipRow), ...more);
    const beyond = left + this.tip.offsetWidth + 16 > this.u.over.clientWidth && left > this.u.over.clientWidth / 2;
    const edge = 4 - this.u.over.getBoundingClientRect().left; // of the window
    this.tip.style.left = `${Math.max(edge, beyond ? left - this.tip.offsetWidth - 8 : left + 8)}px`;
    this.tip.style.top = here ? `${Math.max(0, Math.min(top + 10, this.u.over.clientHeight - this.tip.offsetHeight))}px` : "0px";
  }

  // Rows of the tip: [colour, name, value as text], greatest first.
  values(left, top) {
    if (this.chart.shape === "heat") return heatValue(this.u, this.chart, left, top);
    const [x, near] = [this.u.posToVal(left, "x"), Math.abs(this.u.posToVal(left + 20, "x") - this.u.posToVal(left, "x"))];
    const rows = [];
    for (const line of this.lines) {
      const i = nearest(line.x, x);
      if (i < 0 || line.y[i] === null || x < line.x[0] - near || x > line.x[line.x.length - 1] + near) continue;
      if (this.chart.shape === "edges" && (line === this.lines[0] || line === this.lines[this.lines.length - 1])) continue;
      rows.push([this.colour(line), line.name, line.y[i]]);
    }
    if (this.chart.shape === "stack" || this.chart.shape === "edges") rows.reverse();
    else rows.sort((a, b) => b[2] - a[2]);
    return rows.map(([colour, name, value]) => [colour, name, say(value, this.chart.kind)]);
  }
}

function tipRow([colour, name, value]) {
  const [row, swatch, label, number] = ["div", "i", "span", "b"].map((tag) => document.createElement(tag));
  swatch.className = "swatch";
  swatch.style.background = colour;
  label.textContent = name;
  number.textContent = value;
  row.append(swatch, label, number);
  return row;
}

// The index of the value nearest to x in an ascending list; -1 if it is empty.
function nearest(list, x) {
  let [low, high] = [0, list.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] <= x) low = middle;
    else high = middle;
  }
  return high < 0 ? -1 : x - list[low] <= list[high] - x ? low : high;
}

// The width of the widest label, so that none is cut off.
function widest(u, labels) {
  u.ctx.save();
  u.ctx.font = FONT;
  const width = Math.max(16, ...(labels || []).map((label) => (label ? u.ctx.measureText(label).width : 0)));
  u.ctx.restore();
  return Math.ceil(width);
}

function drawLevel(u, ctx, value, name, pixel) {
  const y = Math.round(u.valToPos(value, "y", true));
  if (!Number.isFinite(y)) return;
  const { bbox } = u;
  ctx.strokeStyle = css("--soft");
  ctx.lineWidth = pixel;
  ctx.setLineDash([5 * pixel, 4 * pixel]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.setLineDash([]);
  ctx.fillStyle = css("--soft");
  ctx.font = FONT.replace("11.5px", `${10.5 * pixel}px`);
  ctx.textAlign = "right";
  const above = y - bbox.top > 16 * pixel;
  ctx.textBaseline = above ? "bottom" : "top";
  ctx.fillText(name, bbox.left + bbox.width - 3 * pixel, above ? y - 2 * pixel : y + 3 * pixel);
}

// A heat map: a column for each stretch of steps, a row for each partition; orange above the mean, blue below.
function drawHeat(u, ctx, chart) {
  for (const { steps, count, cells } of chart.heat.stretches) {
    const edges = steps.map((step) => u.valToPos(step, "x", true));
    cells.forEach((column, i) => {
      const right = edges[i];
      const left = i ? edges[i - 1] : right - (edges.length > 1 ? edges[1] - edges[0] : 6);
      column.forEach((value, j) => {
        if (value === null) return;
        const [top, bottom] = [j + 1, j].map((edge) => u.valToPos((edge * count) / column.length, "y", true));
        const opacity = Math.min(1, Math.abs(value) / chart.heat.limit) * 0.92 + 0.04;
        ctx.fillStyle = value > 0 ? `rgb(222 107 20 / ${opacity})` : `rgb(37 110 214 / ${opacity})`;
        ctx.fillRect(Math.floor(left), Math.floor(top), Math.ceil(right) - Math.floor(left), Math.ceil(bottom) - Math.floor(top));
      });
    });
  }
}

function heatValue(u, chart, left, top) {
  const [step, row] = [u.posToVal(left, "x"), u.posToVal(top, "y")];
  const stretch = chart.heat.stretches.find(({ steps }) => step <= steps[steps.length - 1]);
  if (!stretch || row < 0 || row >= stretch.count) return [];
  const column = stretch.cells[stretch.steps.findIndex((each) => step <= each)];
  const value = column[Math.floor((row * column.length) / stretch.count)];
  if (value === null) return [];
  return [[value > 0 ? "rgb(222 107 20)" : "rgb(37 110 214)", `partition ${Math.floor(row) + 1}`, say(1 + value, "percent")]];
}
