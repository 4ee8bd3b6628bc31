// What is drawn on a canvas around the lines of a chart, and in what colours.
"use strict";

const FONT = '11.5px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif';
const [ABOVE, BELOW] = ["#de6b14", "#256ed6"]; // the mean; both readable on light and dark

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

// Events along an axis: quiet ones as short ticks at the bottom, others over the whole height.
function drawEvents(u, ctx, events, axis, colour, pixel) {
  const { bbox, scales } = u;
  ctx.strokeStyle = colour;
  ctx.lineWidth = pixel;
  for (const [kind, height] of [["quiet", 6 * pixel], ["loud", bbox.height]]) {
    ctx.setLineDash(kind === "loud" ? [2 * pixel, 2 * pixel] : []);
    ctx.beginPath();
    for (const value of events[kind][axis]) {
      if (value === null || value < scales.x.min || value > scales.x.max) continue;
      const x = Math.round(u.valToPos(value, "x", true));
      ctx.moveTo(x, bbox.top + bbox.height);
      ctx.lineTo(x, bbox.top + bbox.height - height);
    }
    ctx.stroke();
  }
}

// A cross at the top wherever a value is not finite.
function drawCrosses(u, ctx, places, colour, pixel) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1.4 * pixel;
  ctx.beginPath();
  for (const value of places) {
    const [x, y, arm] = [u.valToPos(value, "x", true), u.bbox.top + 6 * pixel, 3 * pixel];
    ctx.moveTo(x - arm, y - arm);
    ctx.lineTo(x + arm, y + arm);
    ctx.moveTo(x + arm, y - arm);
    ctx.lineTo(x - arm, y + arm);
  }
  ctx.stroke();
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
        const [x, y] = [Math.floor(left), Math.floor(top)];
        const opacity = Math.min(1, Math.abs(value) / chart.heat.limit) * 0.92 + 0.04;
        ctx.fillStyle = faint(value > 0 ? ABOVE : BELOW, opacity);
        ctx.fillRect(x, y, Math.ceil(right) - x, Math.ceil(bottom) - y);
      });
    });
  }
}
