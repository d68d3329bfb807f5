// Talking to the server: a session of one's own, jobs that say how far they are, and cancelling.

const KEY = "seecause-session";
const PAGE = Math.random().toString(36).slice(2); // tabs share a session, and none cancels what another asked
let opening = null;

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch {
    throw new Error("the server does not answer; is `seecause serve` still running?");
  }
}

async function bodyOf(answer) {
  const body = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw Object.assign(new Error(body.error ?? "the server could not answer"), { status: answer.status });
  return body;
}

// The session that is kept, unless it is the one that was refused: then a new one, the same for all
// questions that found it over.
async function session(refused = null) {
  const kept = localStorage.getItem(KEY); // all tabs of a browser see the same images and results
  if (kept && kept !== refused) return kept;
  opening ??= openSession().finally(() => { opening = null; });
  return opening;
}

async function openSession() {
  const { session: id } = await bodyOf(await reach("/api/session", { method: "POST" }));
  localStorage.setItem(KEY, id);
  return id;
}

export class Cancelled extends Error {}

async function call(path, options = {}, refused = null) {
  const own = await session(refused);
  const answer = await reach(path, { ...options, headers: { ...options.headers, "x-seecause-session": own } });
  if (answer.status === 440 && refused === null) return call(path, options, own);
  return answer.ok && options.raw ? answer : bodyOf(answer);
}

export function hello() {
  return call("/api/hello");
}

export function sample(id) {
  return call(`/api/samples/${id}`);
}

export function upload(file) {
  return call("/api/pictures", {
    method: "POST",
    body: file,
    headers: { "content-type": "application/octet-stream", "x-seecause-name": encodeURIComponent(file.name ?? "") },
  });
}

// A ZIP with a dataset; its name, number of images and classes.
export function uploadData(file) {
  return call("/api/data", { method: "POST", body: file, headers: { "x-seecause-name": encodeURIComponent(file.name) } });
}

// A result that a link names: {panel, action, request, answer}; null if the server has none.
export async function result(id, { progress = () => {} } = {}) {
  asking(1);
  try {
    return await over(await call(`/api/results/${id}`), progress, () => call(`/api/results/${id}`));
  } catch (failure) {
    if (failure instanceof Cancelled || failure.status === 404) return null;
    throw failure;
  } finally {
    asking(-1);
  }
}

export async function download(id) {
  const answer = await call(`/api/files/${id}`, { raw: true });
  const name = /filename="([^"]*)"/.exec(answer.headers.get("content-disposition") ?? "")?.[1];
  return { name: name ?? "seecause", blob: await answer.blob() };
}

// Ask a panel's action. `slot`: a newer question of the same slot takes the place of this one.
// `progress({state, share, words, cancel})` is called while the job is not done.
export async function ask(panel, action, request, options = {}) {
  asking(1);
  try {
    return await finished(panel, action, request, options);
  } finally {
    asking(-1);
  }
}

// How many questions are under way, for whoever looks at the page from outside.
let open = 0;
function asking(more) {
  open += more;
  document.documentElement.dataset.asking = String(open);
}

// `named(id)` is called with the id of a result that the server keeps.
async function finished(panel, action, request, { slot = "", progress = () => {}, named = () => {} }) {
  const job = await call(`/api/run/${panel}/${action}`, {
    method: "POST",
    body: JSON.stringify(request),
    headers: { "content-type": "application/json", "x-seecause-slot": slot && `${PAGE} ${slot}` },
  });
  if (job.result) named(job.result);
  const where = job.result ? `/api/results/${job.result}` : `/api/jobs/${job.job}`;
  return (await over(job, progress, () => call(where))).answer;
}

// Asks again until a job is done; says how long it may still take.
async function over(job, progress, again) {
  let [began, reached] = [Date.now(), 0];
  const cancel = () => call(`/api/jobs/${job.job}`, { method: "DELETE" }).catch(() => {});
  while (job.state === "waiting" || job.state === "running") {
    if (job.share < reached) began = Date.now(); // another part of the work
    reached = job.share ?? 0;
    const seconds = (Date.now() - began) / 1000;
    const left = reached > 0.05 && reached < 1 && seconds > 2 ? (seconds * (1 - reached)) / reached : null;
    progress({ ...job, left, cancel });
    job = await again();
  }
  progress({ ...job, cancel: null });
  if (job.state === "cancelled") throw new Cancelled("cancelled");
  return job;
}

// Of many questions in a row only the latest matters: one is under way, the newest one waits.
export function latest(run) {
  let busy = false;
  let next = null;
  return async function go(...given) {
    if (busy) {
      next = given;
      return;
    }
    busy = true;
    try {
      await run(...given);
    } finally {
      busy = false;
      if (next) {
        const waiting = next;
        next = null;
        go(...waiting);
      }
    }
  };
}
