// Talking to the server: a session of one's own, jobs that say how far they are, and cancelling.

const KEY = "seecause-session";
const PAGE = Math.random().toString(36).slice(2); // a tab that was duplicated has the same session
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
  if (!answer.ok) throw new Error(body.error ?? "the server could not answer");
  return body;
}

// The session that is kept, unless it is the one that was refused: then a new one, the same for all
// questions that found it over.
async function session(refused = null) {
  const kept = sessionStorage.getItem(KEY);
  if (kept && kept !== refused) return kept;
  opening ??= openSession().finally(() => { opening = null; });
  return opening;
}

async function openSession() {
  const { session: id } = await bodyOf(await reach("/api/session", { method: "POST" }));
  sessionStorage.setItem(KEY, id);
  return id;
}

export class Cancelled extends Error {}

async function call(path, options = {}, refused = null) {
  const own = await session(refused);
  const answer = await reach(path, { ...options, headers: { ...options.headers, "x-seecause-session": own } });
  if (answer.status === 440 && refused === null) return call(path, options, own);
  return answer.ok && options.raw ? answer : bodyOf(answer);
}

export async function hello() {
  return bodyOf(await reach("/api/hello"));
}

export async function sample(id) {
  const answer = await fetch(`/api/samples/${id}`);
  if (!answer.ok) throw new Error("this sample cannot be read");
  return answer.json();
}

export function upload(file) {
  return call("/api/pictures", {
    method: "POST",
    body: file,
    headers: { "content-type": "application/octet-stream", "x-seecause-name": encodeURIComponent(file.name ?? "") },
  });
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

async function finished(panel, action, request, { slot = "", progress = () => {} }) {
  let job = await call(`/api/run/${panel}/${action}`, {
    method: "POST",
    body: JSON.stringify(request),
    headers: { "content-type": "application/json", "x-seecause-slot": slot && `${PAGE} ${slot}` },
  });
  const cancel = () => call(`/api/jobs/${job.job}`, { method: "DELETE" }).catch(() => {});
  while (job.state === "waiting" || job.state === "running") {
    progress({ ...job, cancel });
    job = await call(`/api/jobs/${job.job}`);
  }
  progress({ ...job, cancel: null });
  if (job.state === "cancelled") throw new Cancelled("cancelled");
  return job.answer;
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
