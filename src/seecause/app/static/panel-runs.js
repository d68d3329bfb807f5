// Runs: results that the server was started with; their pages open here, each in a sandbox. Links
// name them: ids are places in a list whose newest is first.

import { latest } from "./api.js";
import { Jobs, chooseByArrow, field, h, select } from "./parts.js";

const defaults = { run: "", page: "" };

function mount(root, tools) {
  const mine = () => tools.state().runs;
  let runs = [];

  const job = new Jobs();
  const list = h("div", { class: "run-list", role: "radiogroup", "aria-label": "Results" });
  const none = h("p", { class: "notice", hidden: true }, "Pages of earlier commands can be listed here, too: ", h("code", {}, "seecause serve --runs FOLDER"), " (a folder that a command wrote, or one that holds such folders).");
  const pages = select([], { onchange: (page) => tools.set({ page }) });
  const pagesField = field("Page", pages);
  const apart = h("a", { target: "_blank", rel: "noopener" }, "Open in a new tab");
  const frame = h("iframe", { class: "run-page", sandbox: "allow-scripts", title: "The page of the result", hidden: true });
  const kept = h("div", { class: "run-list kept" });
  const head = h("h2", {}, "Results of this session");
  const folders = h("h2", { hidden: true }, "Folders of results");
  const layout = h("div", { class: "layout waiting" },
    h("aside", { class: "side", "aria-label": "Results" }, head, kept, folders, list),
    h("div", { class: "work" }, job.error, none, h("div", { class: "toolbar run-tools" }, pagesField, apart), frame));
  root.append(layout);

  const chosen = () => runs.find((run) => run.name === mine().run) ?? runs[0];

  function build() {
    list.replaceChildren(...runs.map((run) => h("button", {
      type: "button", role: "radio", "data-run": run.name, onclick: () => tools.set({ run: run.name, page: "" }),
      onkeydown: (event) => chooseByArrow(event, list.children),
    }, h("b", {}, run.name), h("small", {}, run.date))));
  }

  function show() {
    const run = chosen();
    none.hidden = Boolean(run);
    folders.hidden = !run;
    pagesField.hidden = (run?.pages.length ?? 0) < 2;
    apart.hidden = frame.hidden = !run;
    if (!run) return;
    for (const button of list.children) {
      const is = button.dataset.run === run.name;
      button.setAttribute("aria-checked", String(is));
      button.tabIndex = is ? 0 : -1;
    }
    const page = run.pages.find(({ name }) => name === mine().page) ?? run.pages[0];
    pages.replaceChildren(...run.pages.map(({ name }) => h("option", { value: name }, name)));
    pages.value = page.name;
    apart.href = `/runs/${page.id}`;
    frame.title = `${run.name}: ${page.name}`;
    if (frame.getAttribute("src") !== apart.getAttribute("href")) frame.src = `/runs/${page.id}`;
  }

  const listing = latest(async () => {
    const answer = await job.watch((progress) => tools.ask("listed", {}, { slot: "runs", progress }));
    layout.classList.remove("waiting");
    if (!answer) return;
    runs = answer.runs;
    kept.replaceChildren(...answer.kept.map(({ id, action, request, state, date }) => h("button", { type: "button", "data-result": id, onclick: () => {
      const { data, masks, limit, model } = request;
      Object.assign(tools.state().test, { data, masks, limit });
      if (action === "audit") tools.state().test.result = id;
      else Object.assign(tools.state().repair, { remedy: request.remedy, learn: request.learn, force: request.force, results: id });
      tools.go(action === "audit" ? "test" : "repair", { model });
    } }, h("b", {}, action === "audit" ? `Audit of ${request.model}` : `${request.model}: ${request.remedy}`), h("small", {}, `${request.data}, ${date}${state === "done" ? "" : ", running"}`))));
    if (!answer.kept.length) kept.replaceChildren(h("p", { class: "small" }, "Audits and repairs are listed here."));
    build();
    show();
  });
  return { update(state) { if (state.panel !== "runs") return; show(); listing(); } };
}

export const panel = { defaults, noImage: true, mount };
