// Talking to the server: a session of one's own, jobs that say how far they are, and cancelling.

const KEY = "seecause-session";
let opening = null;

async function session(renew = false) {
  const kept = sessionStorage.getItem(KEY);
  if (kept && !renew) return kept;
  opening ??= fetch("/api/session", { method: "POST" })
    .then((answer) => answer.json())
    .then((answer) => {
      sessionStorage.setItem(KEY, answer.session);
      return answer.session;
    })
    .finally(() => { opening = null; });
  return opening;
}

export class Cancelled extends Error {}

async function call(path, options = {}, again = true) {
  const headers = { ...options.headers, "x-seecause-session": await session() };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("the server does not answer; is `seecause serve` still running?");
  }
  if (answer.status === 440 && again) {
    await session(true);
    return call(path, options, false);
  }
  if (answer.ok && options.raw) return answer;
  const body = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(body.error ?? "the server could not answer");
  return body;
}

export async function hello() {
  return (await fetch("/api/hello")).json();
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
// `progress({state, share, words, ahead, cancel})` is called while the job is not done.
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
    headers: { "content-type": "application/json", "x-seecause-slot": slot },
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
