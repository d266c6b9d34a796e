// Background workers, made from the scripts of this page. One runs the newest of its jobs and drops older ones.

function makeBackground(received) {
  const text = [byId("maths").textContent, byId("worker").textContent].join("\n");
  const worker = new Worker(URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
  worker.postMessage({ tables: JSON.parse(byId("tables").textContent) });
  let id = 0, key = "", busy = false;
  worker.onmessage = ({ data }) => {
    if (data.id !== id) return;
    if (data.done) busy = false;
    received(data.part || null, data.done === true);
  };
  worker.onerror = (event) => { throw new Error(event.message); };
  return {
    // Start a job unless the same one was the last; says whether it is new
    ask(job) {
      const asked = JSON.stringify(job);
      if (asked === key) return false;
      key = asked;
      id += 1;
      busy = true;
      worker.postMessage({ ...job, id });
      return true;
    },
    get busy() { return busy; },
  };
}
