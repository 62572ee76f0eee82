// @azure/event-hubs in a process of its own, told what to do by JSON lines, as azure_peer.py is.
//
// A command is {"id": n, "do": name, ...}, its answer {"id": n, "result": ...} or {"id": n, "error": [name, text]}.
// What happens by itself comes as {"note": kind, ...}. The package is used as it is: unpatched, and with its default
// settings but where a command gives others.
//
// Run with the package's directory as the only argument.

import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";

const require = createRequire(join(process.argv[2], "package.json"));
const {
  EventHubBufferedProducerClient,
  EventHubConsumerClient,
  EventHubProducerClient,
  earliestEventPosition,
} = require("@azure/event-hubs");

const say = (line) => process.stdout.write(JSON.stringify(line) + "\n");
const described = (error) => [error.code ?? error.name ?? "Error", String(error.message ?? error)];
const clients = new Map();

function outgoing({ body, ...rest }) {
  return { body: Buffer.from(body, "base64"), ...rest };
}

function received(event) {
  const message = event.getRawAmqpMessage();
  return {
    body: Buffer.isBuffer(event.body) ? event.body.toString("base64") : { value: event.body },
    sequenceNumber: event.sequenceNumber,
    offset: String(event.offset),
    enqueuedTime: event.enqueuedTimeUtc.getTime(),
    partitionKey: event.partitionKey ?? null,
    properties: event.properties ?? {},
    messageId: event.messageId ?? null,
    contentType: event.contentType ?? null,
    correlationId: event.correlationId ?? null,
    annotations: Object.keys(message.messageAnnotations ?? {}),
  };
}

const verbs = {
  async open({ name, kind, connectionString, hub, options }) {
    if (kind === "buffered") {
      const handlers = {
        onSendEventsSuccessHandler: ({ events, partitionId }) =>
          say({ note: "sent", partition: partitionId, count: events.length }),
        onSendEventsErrorHandler: ({ events, partitionId, error }) =>
          say({ note: "failed", partition: partitionId, count: events.length, error: described(error) }),
      };
      clients.set(name, new EventHubBufferedProducerClient(connectionString, hub, { ...handlers, ...options }));
    } else {
      clients.set(name, new EventHubProducerClient(connectionString, hub, options));
    }
  },

  async enqueue({ name, events, target }) {
    for (const event of events) {
      await clients.get(name).enqueueEvent(outgoing(event), target);
    }
  },

  async flush({ name }) {
    await clients.get(name).flush();
  },

  async send({ name, events, target }) {
    await clients.get(name).sendBatch(events.map(outgoing), target);
  },

  async sendInBatch({ name, events, target }) {
    const batch = await clients.get(name).createBatch(target);
    for (const event of events) {
      if (!batch.tryAdd(outgoing(event))) {
        throw new Error("the batch is full");
      }
    }
    await clients.get(name).sendBatch(batch);
    return { count: batch.count, size: batch.sizeInBytes };
  },

  async describe({ name }) {
    const found = await clients.get(name).getEventHubProperties();
    return { name: found.name, partitionIds: found.partitionIds };
  },

  async read({ connectionString, hub, group, partition, count }) {
    const consumer = new EventHubConsumerClient(group, connectionString, hub);
    const found = [];
    try {
      await new Promise((resolve, reject) => {
        consumer.subscribe(
          partition,
          {
            processEvents: async (events) => {
              found.push(...events.map(received));
              if (found.length >= count) {
                resolve();
              }
            },
            processError: async (error) => reject(error),
          },
          // Bodies as bytes: by default one that happens to be JSON comes parsed.
          { startPosition: earliestEventPosition, skipParsingBodyAsJson: true },
        );
      });
    } finally {
      await consumer.close();
    }
    return found;
  },

  async close({ name }) {
    await clients.get(name).close();
    clients.delete(name);
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line);
  verbs[command.do](command).then(
    (result) => say({ id: command.id, result: result ?? null }),
    (error) => say({ id: command.id, error: described(error) }),
  );
}
process.exit(0);
