"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (name, attributes = {}, ...children) => {
    const svg = ["svg", "path", "circle", "text", "title", "g", "rect"].includes(name);
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };

  // ---- contents: folded where the page is narrow, the section in view marked
  const fold = document.querySelector("nav details");
  const wide = matchMedia("(min-width: 64rem)");
  const refold = () => { fold.open = wide.matches; };
  wide.addEventListener("change", refold);
  refold();
  fold.addEventListener("click", (event) => { if (event.target.closest("a") && !wide.matches) fold.open = false; });
  const entries = new Map(all("nav ol a").map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver((changes) => {
    for (const change of changes) {
      const heading = change.target.id || change.target.getAttribute("aria-labelledby");
      const link = entries.get(heading === "records-title" ? "records" : heading);
      if (!link || !change.isIntersecting) continue;
      all("nav a[aria-current]").forEach((other) => other.removeAttribute("aria-current"));
      link.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-15% 0px -80% 0px" });
  all("main > section").forEach((section) => seen.observe(section));

  // ---- tables: sorted by a column, filtered by words
  const number = (text) => {
    const found = text.replace(/,/g, "").replace(/−/g, "-").match(/^\s*[-+]?\d+(\.\d+)?/);
    return found ? Number(found[0]) : null;
  };
  const compare = (a, b) => {
    const [x, y] = [number(a), number(b)];
    if (x !== null && y !== null) return x - y;
    if (x !== null || y !== null) return x !== null ? -1 : 1;
    return a.localeCompare(b);
  };
  const sort = (table, at, order) => {
    const body = table.tBodies[0];
    table.rowsAtFirst ??= [...body.rows];
    const rows = [...table.rowsAtFirst];
    const text = (row) => row.cells[at]?.textContent ?? "";
    const missing = (row) => /^\s*–?\s*$/.test(text(row));
    const sign = order === "descending" ? -1 : 1;
    if (order !== "none") rows.sort((a, b) => missing(a) - missing(b) || sign * compare(text(a), text(b)));
    body.append(...rows);
    all("th[scope=col]", table).forEach((head, i) => head.setAttribute("aria-sort", i === at ? order : "none"));
  };
  const next = { none: "ascending", ascending: "descending", descending: "none" };
  for (const table of all("main table")) {
    if (table.tBodies[0].rows.length < 3) continue;
    all("th[scope=col]", table).forEach((head, at) => {
      // Its name is said in words: a formula alone gives a button none.
      const button = make("button", { type: "button", "aria-label": `sort by ${head.textContent.trim()}` });
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => sort(table, at, next[head.getAttribute("aria-sort")]));
    });
  }
  const filter = (table, words, count) => {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    for (const row of table.tBodies[0].rows) {
      const text = [...row.cells].map((cell) => cell.textContent.toLowerCase()).join(" ");
      row.hidden = !wanted.every((word) => text.includes(word));
      left += row.hidden ? 0 : 1;
    }
    count.textContent = wanted.length ? `${left} of ${table.tBodies[0].rows.length} rows` : "";
  };
  for (const table of all("main table.long")) {
    const id = `${table.id}-filter`;
    const input = make("input", { type: "search", id, placeholder: "words of a row" });
    const count = make("span", { role: "status" });
    input.addEventListener("input", () => filter(table, input.value, count));
    table.parentElement.before(make("div", { class: "filter" }, make("label", { for: id }, "Filter rows"), input, count));
  }

  // ---- numbers: the cases that each one comes from
  const names = (key) => key.split(";").flatMap((group) => {
    const [problem, profile, runs] = group.split(".");
    return runs.split(",").flatMap((run) => {
      const [from, to = from] = run.split("-").map(Number);
      return Array.from({ length: to - from + 1 }, (_, i) => `${problem}.${profile}.${from + i}`);
    });
  });
  const scaled = (unit, most) => {
    const scales = {
      s: [["s", 1], ["ms", 1e-3], ["µs", 1e-6]],
      B: [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024], ["B", 1]],
      J: [["J", 1], ["mJ", 1e-3]],
      Hz: [["MHz", 1e6]],
    }[unit];
    return scales.find(([, size]) => most >= size) ?? scales[scales.length - 1];
  };
  const digits = (x) => Number(x.toPrecision(4)).toString();
  const strip = ([name, unit, samples]) => {
    const sorted = [...samples].sort((a, b) => a - b);
    const half = sorted.length >> 1;
    const median = sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
    const [low, high] = [sorted[0], sorted[sorted.length - 1]];
    const [word, size] = scaled(unit, high);
    const at = (x) => 12 + 576 * (high > low ? (x - low) / (high - low) : 0.5);
    const say = (x) => `${digits(x / size)} ${word}`;
    const words = `${name}: ${samples.length} samples, median ${say(median)}, from ${say(low)} to ${say(high)}` +
      (low > 0 ? ` (${digits(high / low)} times)` : "");
    const drawing = make("svg", { viewBox: "0 0 600 46", role: "img", "aria-label": words });
    drawing.append(make("path", { d: "M12 40H588", stroke: "var(--line)", "stroke-width": 1 }));
    // the first sample stands on top, the last at the bottom
    samples.forEach((x, i) => drawing.append(make("circle", {
      cx: at(x).toFixed(1), cy: (5 + 30 * i / Math.max(1, samples.length - 1)).toFixed(1), r: 2,
      fill: "var(--accent)", "fill-opacity": samples.length > 100 ? 0.35 : 0.7,
    }, make("title", {}, `sample ${i + 1}: ${say(x)}`))));
    drawing.append(make("path", { d: `M${at(median).toFixed(1)} 0V40`, stroke: "var(--focus)", "stroke-width": 1.5 }));
    return make("figure", { class: "strip" }, drawing, make("figcaption", {}, words));
  };
  const pairs = (fields) => make("dl", {}, ...fields.flatMap(([key, value]) => [make("dt", {}, key), make("dd", {}, String(value))]));
  const entry = (name) => {
    const found = data.cases[name];
    const run = data.runs[found.run];
    const facts = [["problem", `${found.problem} (${found.profile}), grid ${found.grid}`], ["machine", run.machine],
      ["run", `${found.run}, ${run.started}`], ["commit", run.commit + (run.dirty ? ", with uncommitted changes" : "")],
      ["outcome", found.outcome]];
    if (found.stale) facts.push(["stale", found.stale]);
    const details = make("details", { class: "entry" }, make("summary", {}, found.params || name));
    const fill = () => {
      if (details.childElementCount > 1) return;
      details.append(pairs(facts), ...found.series.map(strip));
      if (found.values.length) details.append(pairs(found.values));
    };
    details.addEventListener("toggle", fill);
    return [details, fill];
  };
  const dialog = document.getElementById("case");
  const show = (key, said) => {
    const known = names(key).filter((name) => name in data.cases);
    if (!known.length) return false;
    const title = known.length === 1 ? "The case" : `The ${known.length} cases`;
    document.getElementById("case-title").textContent = said ? `${title} behind ${said}` : title;
    const listed = known.map(entry);
    document.getElementById("case-body").replaceChildren(...listed.map(([details]) => details));
    const [first, fill] = listed[0];
    fill();
    first.open = true;
    if (!dialog.open) dialog.showModal();
    document.getElementById("case-title").focus();
    return true;
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a.q");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (show(link.dataset.q ?? link.hash.slice("#case-".length), link.textContent)) event.preventDefault();
  });
  const reveal = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let fold = target; fold; fold = fold.parentElement?.closest("details")) if (fold.matches("details")) fold.open = true;
    if (target) target.scrollIntoView();
    if (location.hash.startsWith("#case-")) show(location.hash.slice("#case-".length));
  };
  addEventListener("hashchange", reveal);
  if (location.hash) reveal();

  // ---- figures: larger, zoomed and moved
  const zoom = document.getElementById("zoom");
  const stage = document.getElementById("zoom-body");
  let box, whole, drawing;
  const draw = () => drawing.setAttribute("viewBox", box.join(" "));
  const within = (axis, start) => Math.max(whole[axis], Math.min(whole[axis] + whole[axis + 2] - box[axis + 2], start));
  const scale = (factor, x = 0.5, y = 0.5) => {
    const size = Math.min(1, box[2] / whole[2] * factor);
    [x, y].forEach((share, axis) => {
      const old = box[axis + 2];
      box[axis + 2] = whole[axis + 2] * size;
      box[axis] = within(axis, box[axis] + (old - box[axis + 2]) * share);
    });
    draw();
  };
  const move = (...shares) => {
    shares.forEach((share, axis) => { box[axis] = within(axis, box[axis] + share * box[axis + 2]); });
    draw();
  };
  const enlarge = (figure) => {
    drawing = figure.querySelector("svg").cloneNode(true);
    drawing.removeAttribute("id");
    whole = drawing.getAttribute("viewBox").split(/[\s,]+/).map(Number);
    box = [...whole];
    stage.replaceChildren(drawing);
    document.getElementById("zoom-title").textContent = "Figure";
    zoom.showModal();
    stage.focus();
  };
  stage.addEventListener("wheel", (event) => {
    event.preventDefault();
    const place = stage.getBoundingClientRect();
    scale(event.deltaY > 0 ? 1.2 : 1 / 1.2, (event.clientX - place.left) / place.width, (event.clientY - place.top) / place.height);
  }, { passive: false });
  stage.addEventListener("pointerdown", (event) => stage.setPointerCapture(event.pointerId));
  stage.addEventListener("pointermove", (event) => {
    if (event.buttons) move(-event.movementX / stage.clientWidth, -event.movementY / stage.clientHeight);
  });
  stage.addEventListener("keydown", (event) => {
    const act = { "+": () => scale(1 / 1.5), "=": () => scale(1 / 1.5), "-": () => scale(1.5), ArrowLeft: () => move(-0.2, 0),
      ArrowRight: () => move(0.2, 0), ArrowUp: () => move(0, -0.2), ArrowDown: () => move(0, 0.2), 0: () => { box = [...whole]; draw(); } }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  for (const figure of all("main figure")) {
    const button = make("button", { type: "button" }, "Enlarge");
    button.addEventListener("click", () => enlarge(figure));
    figure.querySelector("svg").after(button);
  }

  // ---- print: everything unfolded, then as it was
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = all("main details:not([open])");
    folded.forEach((details) => { details.open = true; });
  });
  addEventListener("afterprint", () => folded.forEach((details) => { details.open = false; }));
})();
