// Numbers for people, and where the ticks of an axis are. Plain functions; nothing here touches the page.
"use strict";

const UNITS = {
  bytes: [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]],
  seconds: [[3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"]],
  percent: [[0.01, "%"]],
  count: [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]],
};
const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

// A multiple of a power of ten: 3.2×10⁻⁷.
function power(value, digits) {
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  const short = mantissa.includes(".") ? mantissa.replace(/\.?0+$/, "") : mantissa;
  const tens = "10" + [...exponent.replace("+", "")].map((c) => SUPERSCRIPTS[c]).join("");
  return (short === "1" ? tens : `${short}×${tens}`).replace("-", "−");
}

function number(value, digits = 4) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e15)) return power(value, digits);
  const options = size >= 10 ** digits ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits };
  return value.toLocaleString("en", options).replace("-", "−");
}

// Factor and name of the unit in which a value of this kind and size is said.
function unitFor(kind, size) {
  if (kind === "count" && size < 5000) return [1, ""];
  const scale = UNITS[kind];
  if (!scale) return [1, ""];
  if (size === 0) return kind === "percent" ? scale[0] : [1, { bytes: "B", seconds: "s" }[kind] || ""];
  return scale.find(([factor]) => size >= factor) || scale[scale.length - 1];
}

// A value of this kind: "2.29 MB", "8.2 ms", "4.2 %", "0.9722".
function say(value, kind) {
  if (kind === "count" || !UNITS[kind]) return number(value);
  const [factor, unit] = unitFor(kind, Math.abs(value));
  return `${number(value / factor)} ${unit}`;
}

// Round steps between ticks: multiples of 1, 2 and 5, and for times those of a clock.
function increments(kind) {
  const all = [];
  const whole = kind === "count";
  for (let exponent = whole ? 0 : -15; exponent < 16; exponent++) {
    for (const mantissa of [1, 2, 2.5, 5]) all.push(Number(`${mantissa}e${exponent}`));
  }
  if (whole) return all.filter(Number.isInteger);
  if (kind !== "seconds") return all;
  const clock = [15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200];
  return [...all.filter((v) => v <= 10), ...clock, ...all.map((v) => v * 3600).filter((v) => v > 43200)];
}

// Powers of ten between two values, thinned to about `count`, or with multiples between them if there is room.
function decades(low, high, count) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const stride = Math.max(1, Math.ceil(Math.log10(high / low) / (count + 1)));
  let inside = [];
  for (const mantissas of [[1], [1, 3], [1, 2, 5]]) {
    inside = [];
    for (let exponent = first; exponent <= last; exponent++) {
      if (exponent % stride) continue;
      for (const mantissa of mantissas) {
        const value = Number(`${mantissa}e${exponent}`);
        if (value >= low * 0.999 && value <= high * 1.001) inside.push(value);
      }
    }
    if (inside.length >= 3 || stride > 1) break;
  }
  return inside;
}

// Ticks of a log axis; as of a linear one where the range is less than two decades' marks.
function logTicks(low, high, count) {
  const found = decades(low, high, count);
  if (found.length >= 2) return found;
  const step = increments("number").find((v) => (high - low) / v <= count) || high - low;
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

// Labels of ticks: all in one unit and with the same decimals on a linear axis, each in its own on a log axis.
function tickLabels(ticks, kind, log) {
  const known = ticks.filter((tick) => tick !== null);
  const alone = (tick) => (UNITS[kind] && kind !== "count" ? say(tick, kind) : shortest(tick));
  if (log) return ticks.map((tick) => (tick === null ? null : alone(tick)));
  const [factor, unit] = unitFor(kind, Math.max(0, ...known.map(Math.abs)));
  const step = known.length > 1 ? Math.min(...known.slice(1).map((tick, i) => tick - known[i])) / factor : known[0] / factor;
  const decimals = decimalsOf(step);
  const gap = unit && kind !== "count" ? ` ${unit}` : unit;
  const largest = Math.max(...known.map(Math.abs)) / factor;
  const digits = Math.min(12, 2 + Math.ceil(Math.log10(largest / step))); // so many tell neighbours apart
  return ticks.map((tick) => {
    if (tick === null) return null;
    const value = tick / factor;
    if (Math.abs(value) < step / 1e6) return "0";
    if (largest < 1e-3 || largest >= 1e7) return power(value, digits) + gap;
    const all = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
    return value.toLocaleString("en", all).replace("-", "−") + gap;
  });
}

// How many decimals show a step between ticks exactly.
function decimalsOf(step) {
  for (let digits = 0; digits < 12; digits++) {
    const shifted = step * 10 ** digits;
    if (Math.abs(shifted - Math.round(shifted)) < 1e-6 * Math.abs(shifted)) return digits;
  }
  return 12;
}

function shortest(value) {
  return value >= 1e-3 && value < 1e4 ? number(value) : power(value, 4);
}
