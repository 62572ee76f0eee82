// @azure/event-hubs in a process of its own, told what to do by JSON lines, as azure_peer.py is.
//
// A command is {"id": n, "do": name, ...}, its answer {"id": n, "result": ...} or {"id": n, "error": [name, text]}.
// What happens by itself comes as {"note": kind, ...}. The package is used as it is: unpatched, and with its default
// settings but where a command gives others.
//
// Run with the directories of @azure/event-hubs, of @azure/eventhubs-checkpointstore-blob, and of ws.

import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";

const [eventHubs, checkpointStore, ws] = process.argv.slice(2).map((each) => createRequire(join(each, "package.json")));
const {
  EventHubBufferedProducerClient,
  EventHubConsumerClient,
  EventHubProducerClient,
  earliestEventPosition,
} = eventHubs("@azure/event-hubs");
const { BlobCheckpointStore } = checkpointStore("@azure/eventhubs-checkpointstore-blob");
const { ContainerClient } = checkpointStore("@azure/storage-blob");
const { AzureNamedKeyCredential, AzureSASCredential } = eventHubs("@azure/core-auth");
const WebSocket = ws("ws");

const say = (line) => process.stdout.write(JSON.stringify(line) + "\n");
const described = (error) => [error.code ?? error.name ?? "Error", String(error.message ?? error)];
const clients = new Map();
const credentials = new Map();

// What the package documents for AMQP over WebSockets.
function clientOptions({ webSocket, ...options } = {}) {
  return webSocket ? { ...options, webSocketOptions: { webSocket: WebSocket } } : options;
}

function outgoing({ body, ...rest }) {
  return { body: typeof body === "string" ? Buffer.from(body, "base64") : body.value, ...rest };
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
  // Opens a consumer, which reads about the hub only, with a connection string or with a credential and an endpoint.
  async openConsumer({ name, connectionString, credential, hub, options }) {
    if (credential === null) {
      clients.set(name, new EventHubConsumerClient("$Default", connectionString, hub, clientOptions(options)));
      return;
    }
    const made =
      credential.length === 2 ? new AzureNamedKeyCredential(...credential) : new AzureSASCredential(credential[0]);
    credentials.set(name, made);
    const { hostname } = new URL(options.customEndpointAddress);
    clients.set(name, new EventHubConsumerClient("$Default", hostname, hub, made, clientOptions(options)));
  },

  // Gives the credential of a client other values: name and key, or a signature.
  async rotate({ name, credential }) {
    credentials.get(name).update(...credential);
  },

  async open({ name, kind, connectionString, hub, options: { partitionOptions, ...options } }) {
    if (kind === "buffered") {
      const handlers = {
        onSendEventsSuccessHandler: ({ events, partitionId }) =>
          say({ note: "sent", partition: partitionId, count: events.length }),
        onSendEventsErrorHandler: ({ events, partitionId, error }) =>
          say({ note: "failed", partition: partitionId, count: events.length, error: described(error) }),
      };
      const all = clientOptions({ ...handlers, ...options });
      clients.set(name, new EventHubBufferedProducerClient(connectionString, hub, all));
    } else {
      const producer = new EventHubProducerClient(connectionString, hub, clientOptions(options));
      if (partitionOptions !== undefined) {
        // As the package's own tests do: the plain producer of this version publishes idempotently for the buffered one.
        producer._enableIdempotentRetries = true;
        producer._partitionOptions = partitionOptions;
      }
      clients.set(name, producer);
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

  // Adds the event until the batch takes no more, and sends it.
  async fillBatch({ name, event, target }) {
    const batch = await clients.get(name).createBatch(target);
    while (batch.tryAdd(outgoing(event)));
    await clients.get(name).sendBatch(batch);
    return { count: batch.count, size: batch.sizeInBytes, maxSize: batch.maxSizeInBytes };
  },

  async describe({ name }) {
    const found = await clients.get(name).getEventHubProperties();
    return { name: found.name, partitionIds: found.partitionIds };
  },

  async describePartition({ name, partition }) {
    return await clients.get(name).getPartitionProperties(partition);
  },

  // Reads one partition, or all of them that are its by balancing; what comes is noted, and checkpointed with a store.
  async subscribe({ name, connectionString, hub, group, partition, store, client, options }) {
    const [storage, container] = store ?? [];
    const containerClient = store && new ContainerClient(storage, container);
    const consumer = store
      ? new EventHubConsumerClient(group, connectionString, hub, new BlobCheckpointStore(containerClient), clientOptions(client))
      : new EventHubConsumerClient(group, connectionString, hub, clientOptions(client));
    const handlers = {
      processEvents: async (events, context) => {
        say({
          note: "received",
          name,
          partition: context.partitionId,
          events: events.map(received),
          newest: context.lastEnqueuedEventProperties ?? null,
        });
        if (store && events.length > 0) {
          await context.updateCheckpoint(events.at(-1));
        }
      },
      processError: async (error, { partitionId }) =>
        say({ note: "error", name, partition: partitionId ?? "", error: described(error) }),
      processInitialize: async ({ partitionId }) => say({ note: "initialized", name, partition: partitionId }),
      processClose: async (reason, { partitionId }) => say({ note: "closed", name, partition: partitionId, reason }),
    };
    // Bodies as bytes: by default one that happens to be JSON comes parsed.
    const all = { startPosition: earliestEventPosition, skipParsingBodyAsJson: true, ...options };
    if (all.startPosition.enqueuedOn !== undefined) {
      all.startPosition = { enqueuedOn: new Date(all.startPosition.enqueuedOn) };
    }
    if (partition === null) {
      consumer.subscribe(handlers, all);
    } else {
      consumer.subscribe(partition, handlers, all);
    }
    clients.set(name, consumer);
  },

  // Lists what a store holds of a consumer group.
  async listStored({ store: [storage, container], scope }) {
    const store = new BlobCheckpointStore(new ContainerClient(storage, container));
    return { ownerships: await store.listOwnership(...scope), checkpoints: await store.listCheckpoints(...scope) };
  },

  async close({ name }) {
    const client = clients.get(name);
    clients.delete(name);
    await client.close();
  },

  async closeAll() {
    await Promise.allSettled([...clients.keys()].map((name) => verbs.close({ name })));
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
