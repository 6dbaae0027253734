// Everything here is an addition: without scripts, all pages and actions work as plain forms.
"use strict";
document.documentElement.classList.add("has-script");

(() => {
  const LIVE_MS = 5000, FAST_MS = 1000, CHORD_MS = 1200, COPIED_MS = 2000;
  const byId = (id) => document.getElementById(id);
  const isTyping = () => document.activeElement?.matches("input:not([type=checkbox]), textarea, select");

  // -- live ---------------------------------------------------------------------------------------

  let isLive = sessionStorage.getItem("live") !== "no";
  let refreshedAt = Date.now();

  const showLive = () => byId("live-switch")?.setAttribute("aria-pressed", String(isLive));
  const switchLive = () => {
    isLive = !isLive;
    sessionStorage.setItem("live", isLive ? "yes" : "no");
    showLive();
  };
  setInterval(() => {
    const live = byId("live");
    const wait = live?.dataset.fast === "yes" ? FAST_MS : LIVE_MS;
    // A viewer who types, selects text or rows, or reads a dialog is not interrupted.
    const isBusy = live?.contains(document.activeElement) && isTyping();
    const isReading = String(getSelection()) !== ""
      || document.querySelector("dialog[open], [data-select]:checked");
    if (!live || !isLive || document.hidden || isBusy || isReading) return;
    if (Date.now() - refreshedAt < wait) return;
    refreshedAt = Date.now();
    htmx.trigger(live, "refresh");
  }, 250);
  addEventListener("htmx:beforeSwap", (event) => {
    // Rows that were selected during the request stay selected.
    if (event.detail.target === live && document.querySelector("[data-select]:checked"))
      event.detail.shouldSwap = false;
  });
  addEventListener("htmx:responseError", (event) => {
    // The session has ended: show the login page.
    if (event.detail.xhr.status === 401) location.reload();
  });
  // A redirect to the login page has no live part.
  addEventListener("htmx:beforeSwap", (event) => {
    if (!event.detail.xhr.responseText.includes('id="live"')) {
      event.detail.shouldSwap = false;
      location.reload();
    }
  });

  // -- dialogs ------------------------------------------------------------------------------------

  const open = (id) => {
    const dialog = byId(id);
    if (dialog && !dialog.open) dialog.showModal();
    if (id === "palette") {
      byId("palette-input").value = "";
      filterPalette();
    }
  };
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-open]");
    if (opener) open(opener.dataset.open);
    if (event.target.closest("#live-switch")) switchLive();
    if (event.target.tagName === "DIALOG") event.target.close();
  });
  let confirmed = null;
  document.addEventListener("submit", (event) => {
    const form = event.target, question = form.dataset.confirm;
    if (!question || confirmed === form) return;
    event.preventDefault();
    byId("confirm-text").textContent = question;
    const dialog = byId("confirm");
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      if (dialog.returnValue !== "yes") return;
      confirmed = form;
      form.requestSubmit();
    }, { once: true });
  });

  // -- selected rows ------------------------------------------------------------------------------

  const showSelected = () => {
    const text = byId("selected"), all = byId("select-all");
    if (!text) return;
    const boxes = [...document.querySelectorAll("[data-select]")];
    const count = boxes.filter((box) => box.checked).length;
    text.textContent = count ? `${count} selected:` : "Selected:";
    all.checked = count > 0 && count === boxes.length;
    all.indeterminate = count > 0 && !all.checked;
  };
  document.addEventListener("change", (event) => {
    const isChecked = event.target.checked;
    if (event.target.id === "select-all")
      document.querySelectorAll("[data-select]").forEach((box) => { box.checked = isChecked; });
    if (event.target.matches("#select-all, [data-select]")) showSelected();
  });
  addEventListener("pageshow", showSelected); // a browser that goes back may check the boxes again

  // -- copy ---------------------------------------------------------------------------------------

  const said = Object.assign(document.createElement("div"), { className: "hidden-text" });
  said.setAttribute("role", "status");
  byId("main").append(said);
  const copied = (text) => {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    // Browsers have no clipboard for pages that came by HTTP from another host.
    const field = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(field);
    field.select();
    const isDone = document.execCommand("copy");
    field.remove();
    return isDone ? Promise.resolve() : Promise.reject();
  };
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    said.textContent = "";
    const text = byId(button.dataset.copy).textContent;
    const word = await copied(text).then(() => "Copied", () => "Not copied");
    button.focus();
    button.firstChild.textContent = word;
    said.textContent = word;
    setTimeout(() => { button.firstChild.textContent = "Copy"; }, COPIED_MS);
  });

  // -- command palette ----------------------------------------------------------------------------

  const rows = () => [...byId("palette-list").children].filter((row) => !row.hidden);
  const choose = (row) => {
    byId("palette-list").querySelector(".chosen")?.classList.remove("chosen");
    row?.classList.add("chosen");
    row?.scrollIntoView({ block: "nearest" });
  };
  function filterPalette() {
    const words = byId("palette-input").value.toLowerCase();
    for (const row of byId("palette-list").children)
      row.hidden = !row.textContent.toLowerCase().includes(words);
    choose(rows()[0]);
  }
  byId("palette-input")?.addEventListener("input", filterPalette);
  byId("palette-input")?.addEventListener("keydown", (event) => {
    const shown = rows(), at = shown.findIndex((row) => row.classList.contains("chosen"));
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && shown.length) {
      event.preventDefault();
      choose(shown[(at + step + shown.length) % shown.length]);
    }
    if (event.key !== "Enter") return;
    event.preventDefault();
    const typed = event.target.value.trim();
    const tasks = document.querySelector('nav [data-key="t"]').getAttribute("href");
    if (/^\d{6,}$/.test(typed)) location.assign(`${tasks}/${typed}`);
    else if (shown[at]) shown[at].querySelector("a").click();
    else if (typed) location.assign(`${tasks}?tag=${encodeURIComponent(typed)}`);
  });

  // -- keys ---------------------------------------------------------------------------------------

  let chordAt = 0;
  const moveRow = (step) => {
    const all = [...document.querySelectorAll("[data-row]")];
    if (!all.length) return;
    const at = all.findIndex((row) => row.classList.contains("chosen"));
    all[at]?.classList.remove("chosen");
    const row = all[Math.min(Math.max(at + step, 0), all.length - 1)];
    row.classList.add("chosen");
    row.scrollIntoView({ block: "nearest" });
  };
  const KEYS = {
    "/": () => byId("first-filter")?.focus(),
    "?": () => open("keys"),
    l: switchLive,
    j: () => moveRow(1),
    k: () => moveRow(-1),
    x: () => document.querySelector("[data-row].chosen [data-select]")?.click(),
    g: () => { chordAt = Date.now(); },
    Enter: () => {
      const row = document.querySelector("[data-row].chosen");
      (row?.querySelector("a[data-main]") || row?.querySelector("a"))?.click();
    },
  };
  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k" && byId("palette")) {
      event.preventDefault();
      open("palette");
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping()) return;
    if (document.querySelector("dialog[open]")) return;
    if (Date.now() - chordAt < CHORD_MS && event.key !== "g") {
      chordAt = 0;
      document.querySelector(`nav [data-key="${CSS.escape(event.key)}"]`)?.click();
      return;
    }
    const isOnControl = event.key === "Enter" && document.activeElement !== document.body;
    if (KEYS[event.key] && !isOnControl) {
      if (event.key === "/") event.preventDefault();
      KEYS[event.key]();
    }
  });

  // -- start --------------------------------------------------------------------------------------

  showLive();
  if (matchMedia("(max-width: 760px)").matches)
    document.querySelectorAll("details.more").forEach((more) => { more.open = false; });
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone, list = byId("zones");
  if (zone && list && ![...list.options].some((one) => one.value === zone))
    list.prepend(Object.assign(document.createElement("option"), { value: zone }));
})();
