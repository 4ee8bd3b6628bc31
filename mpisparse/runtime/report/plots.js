// One chart of the page: its uPlot, what is drawn around the lines, and the values under the cursor.
"use strict";

const DASHES = { evaluation: [5, 4], dense: [5, 4], set: [2, 3] };
const MORE_DASHES = [undefined, [9, 3], [3, 3], [9, 3, 3, 3]]; // of runs beyond the number of colours
const COLOURS = 8;
const DOTTED = 40; // up to this many points are also drawn as dots

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
    const add = (line, values, looks) => {
      const series = { label: line.name, spanGaps: !line.bad.length, ...looks }; // gaps are seen where values are not finite
      columns.push({ table: [line.x, shown(values)], series });
    };
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
    const points = { show: line.x.length <= DOTTED, size: 5, stroke, fill: stroke };
    return { stroke, width, dash: this.dash(line), points };
  }

  // Values that add up: areas between sums.
  stack(add, bands) {
    let below = this.lines.length ? this.lines[0].x.map(() => 0) : [];
    this.lines.forEach((line, i) => {
      below = below.map((sum, j) => sum + (line.y[j] ?? 0));
      const fill = () => this.colour(line);
      const points = { show: line.x.length === 1, size: 8, stroke: fill, fill };
      add(line, below, { stroke: fill, width: 0.5, points, fill: i ? undefined : fill });
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
    const label = { label: along.label, labelSize: 19, labelGap: 1 };
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
        { ...axis(along.kind, along.log), scale: "x", space: 62, size: 26, grid: { show: false }, ...label },
        { ...axis(chart.kind, this.log), scale: "y", space: 34, size: (u, labels) => widest(u, labels) + 14, grid },
      ],
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false, dist: 4 }, hover: { skip: [undefined, null] },
        points: { size: 6, show: chart.shape === "lines" },
        bind: { dblclick: () => () => { page.zoomed(chart.along, null); return null; } },
      },
      hooks: {
        drawAxes: [(u) => this.drawBehind(u)],
        draw: [(u) => this.drawInFront(u)],
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
    const levels = chart.levels.map(([value]) => value).filter((value) => !log || value > 0);
    [low, high] = [Math.min(low, ...levels), Math.max(high, ...levels)];
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
      for (const run of runs) {
        const line = this.lines.find((each) => (each.members || [each.run]).includes(run));
        const colour = faint(line.fixed ? css("--soft") : this.colour(line), 0.7);
        drawEvents(u, ctx, this.page.data.runs[run].events, this.chart.along, colour, pixel);
      }
    });
  }

  drawInFront(u) {
    this.inside(u, (ctx, box, pixel) => {
      for (const line of this.lines) drawCrosses(u, ctx, line.bad, this.colour(line), pixel);
    });
  }

  cursorMoved() {
    if (!this.tip) return; // uPlot is still being built
    showTip(this, this.page.pointer === this);
    this.page.cursorMoved(this);
  }
}
