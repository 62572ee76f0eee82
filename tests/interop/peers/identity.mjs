// A user's program of @azure/event-hubs with a credential of Entra's kind: sends an event, reads it, prints its body.
//
// Run with a JSON object (address, hub, token, webSocket) and the directories of @azure/event-hubs and of ws;
// NODE_EXTRA_CA_CERTS names the authority. It ends with the text of the error, if there is one, as the last line.

import { createRequire } from "node:module";
import { join } from "node:path";

const { address, hub, token, webSocket } = JSON.parse(process.argv[2]);
const [eventHubs, ws] = process.argv.slice(3).map((each) => createRequire(join(each, "package.json")));
const { EventHubConsumerClient, EventHubProducerClient, earliestEventPosition } = eventHubs("@azure/event-hubs");

const credential = {
  getToken: async () => ({ token, expiresOnTimestamp: Date.now() + 3_600_000 }),
};
const options = {
  customEndpointAddress: address,
  retryOptions: { maxRetries: 0, timeoutInMs: 10_000 },
  ...(webSocket ? { webSocketOptions: { webSocket: ws("ws") } } : {}),
};

try {
  const producer = new EventHubProducerClient("localhost", hub, credential, options);
  await producer.sendBatch([{ body: "hello" }], { partitionId: "0" });
  await producer.close();
  const consumer = new EventHubConsumerClient("$Default", "localhost", hub, credential, options);
  const event = await new Promise((resolve, reject) => {
    consumer.subscribe(
      "0",
      {
        processEvents: async (events) => events.length > 0 && resolve(events[0]),
        processError: async (error) => reject(error),
      },
      { startPosition: earliestEventPosition },
    );
  });
  console.log(event.body);
  await consumer.close();
} catch (error) {
  console.log(String(error));
}
process.exit(0);
