// An EventHubConsumerClient of @azure/event-hubs in a process of its own: its settings as JSON, and the directories of
// @azure/event-hubs and of @azure/eventhubs-checkpointstore-blob.
//
// It prints a JSON object a line, as every member of a fleet does; see fleet.py. The packages are used as they are:
// what they do is seen by a checkpoint store that passes on every call. At SIGTERM it processes no more, waits for what
// is being processed, and closes its client.

import { createRequire } from "node:module";
import { join } from "node:path";

const settings = JSON.parse(process.argv[2]);
const [eventHubs, checkpointStore] = process.argv.slice(3).map((each) => createRequire(join(each, "package.json")));
const { EventHubConsumerClient, earliestEventPosition } = eventHubs("@azure/event-hubs");
const { BlobCheckpointStore } = checkpointStore("@azure/eventhubs-checkpointstore-blob");
const { ContainerClient } = checkpointStore("@azure/storage-blob");

const say = (kind, facts) => process.stdout.write(JSON.stringify({ is: kind, ...facts }) + "\n");

const store = new BlobCheckpointStore(new ContainerClient(settings.storage, settings.container));
const watched = {
  listCheckpoints: (...scope) => store.listCheckpoints(...scope),
  updateCheckpoint: (...given) => store.updateCheckpoint(...given),
  async listOwnership(...scope) {
    const found = await store.listOwnership(...scope);
    const rows = found.map((each) => [each.partitionId, [each.ownerId, each.lastModifiedTimeInMs / 1000]]);
    say("cycle", { view: Object.fromEntries(rows) });
    return found;
  },
  async claimOwnership(...given) {
    const claimed = await store.claimOwnership(...given);
    for (const owner of new Set(claimed.map((each) => each.ownerId).filter(Boolean))) {
      say("claimed", { owner, partitions: claimed.map((each) => each.partitionId) });
    }
    return claimed;
  },
};

let isStopping = false;
const working = new Set();

const client = new EventHubConsumerClient(
  "$Default",
  settings.connection_string,
  settings.hub,
  watched,
  settings.options,
);
client.subscribe(
  {
    async processEvents(events, context) {
      if (events.length === 0 || isStopping) {
        return;
      }
      const work = (async () => {
        say("processed", { partition: context.partitionId, numbers: events.map((each) => each.sequenceNumber) });
        await context.updateCheckpoint(events.at(-1));
        say("stored", { partition: context.partitionId, number: events.at(-1).sequenceNumber });
      })();
      working.add(work);
      try {
        await work;
      } finally {
        working.delete(work);
      }
    },
    async processError(error, { partitionId }) {
      say("error", { partition: partitionId, text: `${error.code ?? error.name}: ${error.message}`.slice(0, 300) });
    },
    async processInitialize({ partitionId }) {
      say("opened", { partition: partitionId });
    },
    async processClose(reason, { partitionId }) {
      say("closed", { partition: partitionId, reason });
    },
  },
  { startPosition: earliestEventPosition, maxWaitTimeInSeconds: 1 },
);

process.on("SIGTERM", async () => {
  isStopping = true;
  await Promise.allSettled([...working]);
  await client.close();
  say("stopped", {});
  process.exit(0);
});
