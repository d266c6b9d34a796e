// The loop of a background worker: it runs the newest job, and reports partial results as they come.

let newest = null, running = false;

const pause = () => new Promise((done) => setTimeout(done));

async function work() {
  running = true;
  while (newest) {
    const job = newest;
    newest = null;
    let last = performance.now();
    for (const part of JOBS[job.kind](job)) {
      if (part) postMessage({ id: job.id, part });
      if (part || performance.now() - last > 30) {
        await pause();
        last = performance.now();
      }
      if (newest) break;
    }
    if (!newest) postMessage({ id: job.id, done: true });
  }
  running = false;
}

onmessage = ({ data }) => {
  if (data.tables) loadTables(data.tables);
  else {
    newest = data;
    if (!running) work();
  }
};
