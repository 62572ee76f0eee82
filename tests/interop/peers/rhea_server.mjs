// A service on rhea, an AMQP engine nobody here wrote: it stores what it is sent and sends what it stored.
//
// It knows $cbs, $management, the addresses of one hub, batches and start positions: what a client of Event Hubs needs
// to work, and no more. Told what to do by JSON lines: a command is {"id": n, "do": name, ...}, its answer
// {"id": n, "result": ...} or {"id": n, "error": [name, text]}; what happens by itself comes as {"note": kind, ...}.
//
// Run with the directories of rhea and ws, and the options as JSON.

import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { createServer as createTlsServer } from "node:https";
import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";

const [rheaDirectory, wsDirectory, given] = process.argv.slice(2);
const require = createRequire(join(rheaDirectory, "package.json"));
const rhea = require("rhea");
const { types, message: messages } = rhea;

const options = JSON.parse(given);
const { hub, partitions, creditWindow, isSettled, maxMessageSize } = options;
const BATCH_FORMAT = 0x80013700;
const FILTER = "apache.org:selector-filter:string";
const PREFIX = "com.microsoft:";

const say = (line) => process.stdout.write(JSON.stringify(line) + "\n");
const described = (error) => [error.condition ?? error.name ?? "Error", String(error.description ?? error.message)];

const logs = Array.from({ length: partitions }, () => []);
const connections = new Set();
const readers = new Map(); // sender link of rhea's -> {partition, next, sent}
const writers = new Set(); // receiver links of rhea's
const seen = { opens: [], tokens: [], outcomes: [], transfers: 0 };
let refusals = [];
let outcomes = [];
let nextPartition = 0;

// ------------------------------------------------------------------------------------------------------ addresses

// Clients name a node by a URL, by an absolute path, or as it is.
function parse(address) {
  const path = String(address ?? "").replace(/^\w+:\/\/[^/]*/, "").replace(/^\//, "");
  const found = path.match(/^([^/$]+)(?:\/ConsumerGroups\/[^/]+)?(?:\/Partitions\/(\d+))?$/i);
  if (path === "$cbs" || path === "$management") {
    return { node: path };
  }
  if (found === null || found[1] !== hub || Number(found[2] ?? 0) >= partitions) {
    return {};
  }
  return { node: hub, partition: found[2] === undefined ? undefined : Number(found[2]) };
}

function startOf(log, filter) {
  const text = filter?.[FILTER]?.value ?? filter?.[FILTER] ?? "";
  const found = String(text).match(/x-opt-(\S+) (>=?) '?([^']*)'?$/);
  if (found === null) {
    return 0;
  }
  const [, field, operator, value] = found;
  if (value === "@latest") {
    return log.length;
  }
  const read = { offset: (e) => Number(e.offset), "sequence-number": (e) => e.number, "enqueued-time": (e) => e.time }[field];
  const index = log.findIndex((event) => (operator === ">" ? read(event) > Number(value) : read(event) >= Number(value)));
  return index < 0 ? log.length : index;
}

// ---------------------------------------------------------------------------------------------------------- nodes

function store(partition, content) {
  const log = logs[partition];
  const number = log.length;
  log.push({ number, offset: String(number * 100), time: Date.now(), content });
  for (const [link, reader] of readers) {
    if (reader.partition === partition) {
      serve(link);
    }
  }
}

function serve(link) {
  const reader = readers.get(link);
  const log = logs[reader.partition];
  // rhea takes whatever it is given and counts it later; beyond its credit it would block the links beside this one.
  while (link.is_open() && reader.sent < link.delivery_count + link.credit && reader.next < log.length && link.sendable()) {
    const event = log[reader.next++];
    reader.sent += 1;
    link.send({
      ...event.content,
      message_annotations: {
        ...event.content.message_annotations,
        "x-opt-sequence-number": types.wrap_long(event.number),
        "x-opt-offset": event.offset,
        "x-opt-enqueued-time": types.wrap_timestamp(event.time),
      },
    });
  }
}

function take({ message, delivery, format, receiver }) {
  seen.transfers += 1;
  const { partition = nextPartition++ % partitions } = parse(receiver.target.address);
  const planned = outcomes.shift();
  if (planned !== undefined) {
    const { kind, condition, description } = planned;
    delivery[{ rejected: "reject", released: "release", modified: "modified" }[kind]](
      kind === "rejected" ? { condition, description } : { delivery_failed: true },
    );
    return;
  }
  if (format === BATCH_FORMAT) {
    const { content, multiple } = messages.decode(message).body;
    for (const inner of multiple ? content : [content]) {
      store(partition, messages.decode(inner));
    }
  } else {
    store(partition, message);
  }
  delivery.accept();
}

function answer({ message, connection }, node) {
  const request = message.application_properties ?? {};
  const reply = (status, description, body) => {
    const links = [];
    connection.each_link((link) => {
      if (link.is_sender() && parse(link.source?.address).node === node) {
        links.push(link);
      }
    });
    const chosen = links.find((link) => [link.target?.address, link.name].includes(message.reply_to)) ?? links[0];
    chosen.send({
      correlation_id: message.message_id,
      to: message.reply_to,
      application_properties: { "status-code": types.wrap_int(status), "status-description": description },
      body,
    });
  };
  if (node === "$cbs") {
    seen.tokens.push([request.type, request.name]);
    reply(202, "Accepted");
    return;
  }
  const partition = Number(request.partition ?? -1);
  if (request.name !== hub || partition >= partitions) {
    reply(404, "The messaging entity could not be found");
  } else if (request.type === `${PREFIX}eventhub`) {
    reply(200, "OK", {
      name: hub,
      type: request.type,
      created_at: types.wrap_timestamp(1_600_000_000_000),
      partition_count: types.wrap_int(partitions),
      partition_ids: types.wrap_array(logs.map((_, id) => String(id)), 0xa1),
    });
  } else {
    const last = logs[partition].at(-1);
    reply(200, "OK", {
      name: hub,
      type: request.type,
      partition: String(partition),
      begin_sequence_number: types.wrap_long(0),
      last_enqueued_sequence_number: types.wrap_long(last?.number ?? -1),
      last_enqueued_offset: last?.offset ?? "-1",
      last_enqueued_time_utc: types.wrap_timestamp(last?.time ?? 0),
      is_partition_empty: last === undefined,
    });
  }
}

// -------------------------------------------------------------------------------------------------------- the peer

rhea.on("connection_open", ({ connection }) => {
  connections.add(connection);
  const { container_id, hostname, max_frame_size, idle_time_out, channel_max } = connection.remote.open;
  seen.opens.push({ container_id, hostname, max_frame_size, idle_time_out, channel_max });
});

function refuse(link) {
  const planned = refusals.shift();
  if (planned !== undefined) {
    link.close(planned);
  }
  return planned !== undefined;
}

rhea.on("receiver_open", ({ receiver }) => {
  const { node } = parse(receiver.target.address);
  if (node === undefined) {
    receiver.close({ condition: "amqp:not-found", description: "The messaging entity could not be found" });
    return;
  }
  if (node === hub && refuse(receiver)) {
    return;
  }
  receiver.set_target(receiver.target);
  receiver.set_source(receiver.source);
  if (node === hub) {
    receiver.local.attach.max_message_size = maxMessageSize;
    writers.add(receiver);
  }
  const window = node === hub ? creditWindow : 100;
  receiver.set_credit_window(window);
  receiver.add_credit(window);
});

rhea.on("sender_open", ({ sender }) => {
  const { node, partition } = parse(sender.source.address);
  if (node === undefined || (node === hub && partition === undefined)) {
    sender.close({ condition: "amqp:not-found", description: "The messaging entity could not be found" });
    return;
  }
  if (node === hub && refuse(sender)) {
    return;
  }
  sender.set_source(sender.source);
  sender.set_target(sender.target);
  sender.local.attach.snd_settle_mode = isSettled || node !== hub ? 1 : 0;
  if (node === hub) {
    readers.set(sender, { partition, sent: 0, next: startOf(logs[partition], sender.source.filter) });
    say({ note: "reading", partition });
  }
});

rhea.on("sendable", ({ sender }) => readers.has(sender) && serve(sender));

rhea.on("message", (context) => {
  const { node } = parse(context.receiver.target.address);
  if (node === hub) {
    take(context);
  } else {
    answer(context, node);
  }
});

for (const kind of ["accepted", "released", "rejected", "modified"]) {
  rhea.on(kind, () => seen.outcomes.push(kind));
}

function ended(link) {
  readers.delete(link);
  writers.delete(link);
  say({ note: "detached", error: link.error ? described(link.error) : null });
}

rhea.on("sender_close", ({ sender }) => ended(sender));
rhea.on("receiver_close", ({ receiver }) => ended(receiver));

function gone(connection, kind, error) {
  connections.delete(connection);
  for (const link of [...readers.keys(), ...writers]) {
    if (link.connection === connection) {
      readers.delete(link);
      writers.delete(link);
    }
  }
  say({ note: kind, error: error ? described(error) : null });
}

rhea.on("connection_close", ({ connection }) => gone(connection, "closed", connection.error));
rhea.on("disconnected", ({ connection, error }) => connections.has(connection) && gone(connection, "lost", error));
for (const kind of ["error", "protocol_error"]) {
  rhea.on(kind, (error) => say({ note: "broken", error: described(error) }));
}

const isHubs = (link) => readers.has(link) || writers.has(link);

const verbs = {
  detach: (error) => [...readers.keys(), ...writers].forEach((link) => link.close(error)),
  end: (error) => new Set([...readers.keys(), ...writers].map((link) => link.session)).forEach((each) => each.close(error)),
  close: (error) => [...connections].forEach((connection) => connection.close(error)),
  grant: ({ count }) => [...writers].forEach((link) => link.add_credit(count)),
  refuse: (error) => void refusals.push(error),
  answer: ({ count, ...planned }) => void outcomes.push(...Array(count).fill(planned)),
  credits: () => [...readers.keys()].filter(isHubs).map((link) => link.credit),
  seen: () => seen,
  events: ({ partition }) =>
    logs[partition].map(({ content }) => ({
      body: content.body.content.toString("base64"),
      properties: content.application_properties ?? {},
      annotations: content.message_annotations ?? {},
    })),
};

// ----------------------------------------------------------------------------------------------------------- start

// What the service offers besides; .NET and uamqp ask for the first.
rhea.sasl_server_mechanisms.MSSBCBS = () => ({ start: function () { this.outcome = true; } });
rhea.sasl_server_mechanisms.enable_anonymous();

const connection = { max_frame_size: options.maxFrameSize, credit_window: 0, idle_time_out: options.idleTimeOut };
const tls = options.tls && { cert: readFileSync(options.tls), key: readFileSync(options.tls) };

function listen() {
  if (!options.webSocket) {
    return rhea.listen({ host: "127.0.0.1", port: 0, transport: tls ? "tls" : "tcp", ...tls, ...connection });
  }
  const { WebSocketServer } = createRequire(join(wsDirectory, "package.json"))("ws");
  const server = tls ? createTlsServer(tls) : createServer();
  const sockets = new WebSocketServer({
    server,
    path: "/$servicebus/websocket",
    handleProtocols: (offered) => (offered.has("AMQPWSB10") ? "AMQPWSB10" : false),
  });
  sockets.on("connection", (socket) => rhea.websocket_accept(socket, connection));
  return server.listen(0, "127.0.0.1");
}

const server = listen();
server.on("listening", () => say({ note: "listening", port: server.address().port }));

for await (const line of createInterface({ input: process.stdin })) {
  const { id, do: verb, ...argumentsOf } = JSON.parse(line);
  try {
    say({ id, result: verbs[verb](argumentsOf) ?? null });
  } catch (error) {
    say({ id, error: described(error) });
  }
}
process.exit(0);
