"use strict";
(function () {
  const root = document.documentElement;
  root.classList.add("js");
  const numbers = JSON.parse(document.getElementById("numbers").textContent);
  const percent = (share) => (100 * share).toFixed(share < 0.1 ? 2 : 1) + " %";

  // Tables: a click on a heading sorts, a second click turns the order round.
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      const value = (row) => {
        const cell = row.cells[column];
        return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
      };
      button.addEventListener("click", () => {
        const upward = head.getAttribute("aria-sort") === "descending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", upward ? "ascending" : "descending");
        const sign = upward ? 1 : -1;
        const compare = (a, b) => typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
        body.append(...[...body.rows].sort((a, b) => sign * compare(value(a), value(b))));
      });
    });
  }

  // Samples: filter by kind, label and words, sort, show a page at a time, choose, and save as CSV.
  const PAGE = 24;
  const list = document.getElementById("list");
  const cards = list ? [...list.children] : [];
  const control = (id) => document.getElementById(id);
  const chosen = new Set();
  let kind = "", limit = PAGE, found = [];
  const say = () => {
    control("save").hidden = !chosen.size && !found.length;
    control("chosen").textContent = chosen.size ? chosen.size + " chosen" : found.length + " found; choose some to save only these";
  };
  const show = () => {
    const words = control("find") ? control("find").value.trim().toLowerCase() : "";
    const label = control("label") ? control("label").value : "";
    const order = control("sort") ? control("sort").value : "order";
    const sign = order.startsWith("-") ? -1 : 1, key = order.replace("-", "");
    const number = (card) => {
      const value = Number(card.dataset[key]);
      return Number.isNaN(value) ? Infinity : value;
    };
    cards.sort((a, b) => sign * (number(a) - number(b)) || a.dataset.order - b.dataset.order);
    list.append(...cards);
    found = cards.filter((card) => (!kind || card.dataset.kind === kind) && (!label || card.dataset.label === label)
      && (!words || card.textContent.toLowerCase().includes(words)));
    const shown = new Set(found.slice(0, limit));
    for (const card of cards) card.hidden = !shown.has(card);
    control("shown").textContent = shown.size + " of " + found.length + " shown";
    control("more").hidden = found.length <= limit;
    say();
  };
  // A spreadsheet runs text that begins like a formula; an apostrophe prevents it.
  const FORMULA = /^'*[=+\-@\t\r\n\0\uff1d\uff0b\uff0d\uff20]/, NUMERAL = /^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$/;
  const cell = (value) => {
    let text = value === null || value === undefined ? "" : String(value);
    if (typeof value !== "number" && FORMULA.test(text) && !NUMERAL.test(text)) text = "'" + text;
    return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };
  const table = (wanted) => {
    const rows = numbers.samples.filter((sample) => wanted.has(sample.row));
    const columns = [...new Set(rows.flatMap((sample) => sample.values.map((value) => value.name)))];
    const name = (code) => code < 0 ? null : numbers.class_names[code];
    const head = ["row", "id", "kind", "label", "head_label", "true_label", "score", "confidence", "p_value", "trust", "softmax"];
    const lines = rows.map((sample) => [
      sample.row, numbers.ids[sample.row], sample.kind, name(sample.label), name(sample.own), sample.truth, sample.joint,
      sample.confidence, sample.p_value, sample.trust, sample.softmax,
      ...columns.map((column) => (sample.values.find((value) => value.name === column) || {}).text)]);
    return [[...head, ...columns], ...lines].map((line) => line.map(cell).join(",") + "\r\n").join("");
  };
  if (list) {
    for (const card of cards) {
      const pick = document.createElement("label"), box = document.createElement("input");
      box.type = "checkbox";
      pick.className = "pick";
      pick.append(box, "choose");
      box.addEventListener("change", () => {
        const row = Number(card.dataset.row);
        if (box.checked) chosen.add(row); else chosen.delete(row);
        say();
      });
      card.querySelector(".body").prepend(pick);
    }
    for (const button of document.querySelectorAll("button[data-kind]")) {
      button.addEventListener("click", () => {
        kind = button.dataset.kind;
        limit = PAGE;
        for (const other of document.querySelectorAll("button[data-kind]")) other.setAttribute("aria-pressed", other === button);
        show();
      });
    }
    for (const id of ["sort", "label"]) if (control(id)) control(id).addEventListener("change", () => { limit = PAGE; show(); });
    if (control("find")) control("find").addEventListener("input", () => { limit = PAGE; show(); });
    control("more").addEventListener("click", () => { limit += 2 * PAGE; show(); });
    control("save").addEventListener("click", () => {
      const wanted = chosen.size ? chosen : new Set(found.map((card) => Number(card.dataset.row)));
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([table(wanted)], { type: "text/csv" }));
      link.download = "rows.csv";
      link.click();
    });
    show();
  }

  // Map: rest on a mark to read its row, click one with a card to go to the card; a class of the legend lights up.
  const map = document.querySelector("svg.map");
  const below = document.getElementById("map-at"), rest = below.textContent;
  map.addEventListener("pointerover", (event) => {
    const mark = event.target.closest(".pt");
    const more = mark && mark.dataset.row !== undefined ? " Click to see why." : "";
    below.textContent = mark ? mark.querySelector("title").textContent + "." + more : rest;
  });
  map.addEventListener("click", (event) => {
    const mark = event.target.closest(".pt[data-row]");
    if (!mark) return;
    const card = document.getElementById("row-" + mark.dataset.row);
    for (const other of cards) other.classList.remove("found");
    card.hidden = false;
    card.classList.add("found");
    card.scrollIntoView({ block: "center" });
  });
  for (const item of document.querySelectorAll("[data-class]")) {
    const light = (lit) => {
      map.classList.toggle("dim", lit);
      for (const mark of map.querySelectorAll("." + item.dataset.class)) mark.classList.toggle("lit", lit);
    };
    item.addEventListener("pointerenter", () => light(true));
    item.addEventListener("pointerleave", () => light(false));
  }

  // Risk over coverage: read both curves at the pointer.
  const chart = document.querySelector("svg.risk"), caption = document.getElementById("risk-at");
  if (chart && numbers.risk) {
    const said = caption.textContent;
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect(), view = chart.viewBox.baseVal;
      const x = ((event.clientX - box.left) / box.width) * view.width;
      const coverage = Math.min(1, Math.max(0, (x - chart.dataset.left) / (chart.dataset.right - chart.dataset.left)));
      const parts = numbers.risk.curves.map((curve) => {
        const i = curve.coverage.findIndex((value) => value >= coverage);
        return curve.name + " " + percent(curve.risk[i < 0 ? curve.risk.length - 1 : i]);
      });
      caption.textContent = "Accepting " + percent(coverage) + ": wrong " + parts.join(", ") + ".";
    });
    chart.addEventListener("pointerleave", () => { caption.textContent = said; });
  }
})();
