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

  // Samples: filter by kind and words, sort, and show a page at a time.
  const PAGE = 24;
  const list = document.getElementById("list");
  const cards = list ? [...list.children] : [];
  let kind = "", limit = PAGE;
  const show = () => {
    const words = document.getElementById("find").value.trim().toLowerCase();
    const order = document.getElementById("sort").value;
    const sign = order.startsWith("-") ? -1 : 1, key = order.replace("-", "");
    const number = (card) => {
      const value = Number(card.dataset[key]);
      return Number.isNaN(value) ? Infinity : value;
    };
    cards.sort((a, b) => sign * (number(a) - number(b)) || a.dataset.order - b.dataset.order);
    list.append(...cards);
    let found = 0;
    for (const card of cards) {
      const wanted = (!kind || card.dataset.kind === kind) && (!words || card.textContent.toLowerCase().includes(words));
      if (wanted) found += 1;
      card.hidden = !wanted || found > limit;
    }
    document.getElementById("shown").textContent = Math.min(found, limit) + " of " + found + " shown";
    document.getElementById("more").hidden = found <= limit;
  };
  if (list) {
    for (const button of document.querySelectorAll("button[data-kind]")) {
      button.addEventListener("click", () => {
        kind = button.dataset.kind;
        limit = PAGE;
        for (const other of document.querySelectorAll("button[data-kind]")) other.setAttribute("aria-pressed", other === button);
        show();
      });
    }
    document.getElementById("sort").addEventListener("change", show);
    document.getElementById("find").addEventListener("input", () => { limit = PAGE; show(); });
    document.getElementById("more").addEventListener("click", () => { limit += 2 * PAGE; show(); });
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
