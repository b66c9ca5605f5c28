// Injected into the page by the_page_works_in_a_browser: tells the page around it "well", or what it found.
"use strict";
{
  const findings = [];
  const expect = (holds, words) => { if (!holds) findings.push(words); };
  addEventListener("error", (event) => findings.push(event.message));
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const isSorted = (values) => values.every((value, i) => i === 0 || values[i - 1] <= value);
  const value = (cell) => Number(cell.textContent.replace(/,/g, "").replace("−", "-"));
  try {
    for (const link of all("a[href^='#']")) {
      expect(document.getElementById(decodeURIComponent(link.hash.slice(1))), `${link.hash} leads nowhere`);
    }
    const numbers = all("a.q");
    const dialog = document.getElementById("case");
    for (let i = 0; i < numbers.length; i += 97) {
      numbers[i].click();
      expect(dialog.open && dialog.querySelector(".entry dl"), `the number ${numbers[i].textContent} opens no case`);
      dialog.close();
    }
    numbers.find((number) => number.closest("td")).click();
    const table = all("main table.long").find((table) => table.tBodies[0].rows.length > 12);
    const row = [...table.tBodies[0].rows].find((row) => /\d/.test(row.cells[1].textContent));
    const input = document.getElementById(`${table.id}-filter`);
    input.value = row.cells[0].textContent;
    input.dispatchEvent(new Event("input"));
    const shown = [...table.tBodies[0].rows].filter((row) => !row.hidden);
    expect(!row.hidden && shown.length > 0, "the filter hides the row that has its words");
    input.value = "no row has these words";
    input.dispatchEvent(new Event("input"));
    expect([...table.tBodies[0].rows].every((row) => row.hidden), "the filter shows rows without its words");
    input.value = "";
    input.dispatchEvent(new Event("input"));
    expect([...table.tBodies[0].rows].every((row) => !row.hidden), "an empty filter hides rows");
    const sortable = all("main table").find((table) => table.tBodies[0].rows.length > 2 &&
      [...table.tBodies[0].rows].every((row) => Number.isFinite(value(row.cells[row.cells.length - 1]))));
    const head = sortable.tHead.rows[0].cells;
    head[head.length - 1].querySelector("button").click();
    const last = () => [...sortable.tBodies[0].rows].map((row) => value(row.cells[row.cells.length - 1]));
    expect(isSorted(last()), "a click on its head does not sort a table");
    expect(head[head.length - 1].getAttribute("aria-sort") === "ascending", "a sorted column does not say so");
    head[head.length - 1].querySelector("button").click();
    expect(isSorted(last().reverse()), "a second click does not turn the order");
    const zoom = document.getElementById("zoom");
    document.querySelector("main figure button").click();
    const box = () => document.querySelector("#zoom-body svg").getAttribute("viewBox");
    const whole = box();
    document.getElementById("zoom-body").dispatchEvent(new KeyboardEvent("keydown", { key: "+" }));
    expect(zoom.open && box() !== whole, "a figure does not grow");
    zoom.close();
    dialog.close();
    expect(document.documentElement.scrollWidth <= innerWidth, `the page is ${document.documentElement.scrollWidth} wide`);
    const levels = all("h1, h2, h3, h4, h5, h6", document.querySelector("main")).map((heading) => Number(heading.localName[1]));
    expect(levels.every((level, i) => level <= (levels[i - 1] ?? 0) + 1), "the levels of headings skip one");
    expect(levels.filter((level) => level === 1).length === 1, "there is not one heading of level 1");
    const colour = (text) => { const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number); return { rgb: [r, g, b], a }; };
    const luminance = (rgb) => {
      const [r, g, b] = rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)]; return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05); };
    const ground = (element) => {
      const found = element && colour(getComputedStyle(element).backgroundColor);
      return !element ? [255, 255, 255] : found.a === 1 ? found.rgb : ground(element.parentElement);
    };
    // words inside a shape have a fill of their own, which the tests of figures hold
    const worded = all("body *").filter((element) => !element.closest("script, style, title") && !element.hasAttribute("fill") &&
      [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim()));
    for (const element of worded) {
      const style = getComputedStyle(element);
      const ink = colour(element.closest("svg") ? style.fill : style.color);
      const found = contrast(ink.rgb, ground(element.closest("svg") ?? element));
      expect(found >= 4.5, `${element.localName} "${element.textContent.slice(0, 30)}" has a contrast of ${found.toFixed(2)}`);
    }
    const named = (element) => element.getAttribute("aria-label")?.trim() || element.textContent.trim() ||
      all(`label[for="${element.id}"]`).some((label) => label.textContent.trim()) ||
      document.getElementById(element.getAttribute("aria-labelledby"))?.textContent.trim();
    for (const control of all("a[href], button, input, summary, dialog, nav, section[aria-labelledby]")) {
      expect(named(control), `${control.outerHTML.slice(0, 60)} has no name`);
    }
    for (const region of all("div[tabindex='0']")) {
      expect(region.getAttribute("role") && region.getAttribute("aria-label"), `${region.outerHTML.slice(0, 60)} has no name`);
    }
    for (const table of all("table")) expect(table.tHead && table.querySelector("th[scope=row]"), `${table.id} has no heads`);
    for (const math of all("math")) expect(math.textContent.trim(), "a formula is empty");
    for (const drawing of all("svg[role=img]")) expect(drawing.getAttribute("aria-label"), "a drawing has no text");
    for (const field of all("input")) expect(document.querySelector(`label[for="${field.id}"]`), `${field.id} has no label`);
    for (const button of all("button")) expect(button.textContent.trim(), "a button has no text");
    for (const head of all("th")) expect(head.getAttribute("scope"), "a head of a table has no scope");
    for (const name of ["main", "nav", "h1", "a.skip"]) expect(document.querySelector(name), `there is no ${name}`);
  } catch (error) {
    findings.push(String(error));
  }
  parent.postMessage(findings.slice(0, 5).join("; ") || "well", "*");
}
