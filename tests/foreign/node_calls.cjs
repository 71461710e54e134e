// node node_calls.cjs LIBRARY SOCKET: a lease's life through somebody else's MessagePack-RPC library, told as one line of JSON.
'use strict';
const net = require('node:net');
const [library, socket] = process.argv.slice(2);
const told = [];
let call;
const heard = (name, params) => {
  told.push([name, params[0].type ?? null]);
  if (name === 'prove') call('prove', params); // a kernel before Linux 6.5: the daemon asks which process this is
};

const libraries = {
  neovim() {
    const { Transport } = require('neovim/lib/utils/transport');
    const stream = net.connect(socket);
    const transport = new Transport();
    transport.attach(stream, stream, null);
    transport.on('notification', heard);
    return {
      call: (method, params) =>
        new Promise((resolve, reject) => transport.request(method, params, (error, result) => (error ? reject(error) : resolve(result)))),
      close: () => stream.end(),
    };
  },
  msgpack5rpc() {
    const Session = require('msgpack5rpc');
    const stream = net.connect(socket);
    const session = new Session();
    session.attach(stream, stream);
    session.on('notification', heard);
    return {
      call: (method, params) =>
        new Promise((resolve, reject) => session.request(method, params, (error, result) => (error ? reject(error) : resolve(result)))),
      close: () => stream.end(),
    };
  },
};

(async () => {
  const connection = libraries[library]();
  call = connection.call;
  const key = `node:${library}`;
  const answer = {};
  answer.name = (await call('info', [])).name;
  const grant = await call('lease', [{ key, holder: 'first', ttl_seconds: 30, bind: 'process' }]);
  answer.grant = [grant.acquired, typeof grant.fence, Number.isSafeInteger(grant.generation)];
  answer.refusal = (await call('lease', [{ key, holder: 'second' }])).reason;
  answer.renewed = (await call('renew', [{ key, holder: 'first', fence: grant.fence, ttl_seconds: 45.5 }])).ttl_seconds;
  answer.check = (await call('check', [{ key, generation: grant.generation }])).current;
  answer.list = (await call('list', [{ holder: 'first' }])).leases.map((lease) => lease.key);
  answer.errors = [];
  for (const [method, params] of [['lease', [{ key }]], ['steal', [{ key }]], ['check', [{ key: Buffer.from(key) }]]]) {
    await call(method, params).catch((error) => answer.errors.push(error));
  }
  const number = Number(grant.fence); // one fence in a thousand is a number that JavaScript can hold
  answer.rounded = BigInt(number) === BigInt(grant.fence) ? 'not_holder' : (await call('release', [{ key, fence: number }])).reason;
  await call('watch', [{ key }]);
  const waiting = call('lease', [{ key, holder: 'second', wait_seconds: 60 }]);
  while ((await call('check', [{ key }])).waiting === 0);
  answer.released = (await call('release', [{ key, fence: grant.fence }])).released;
  answer.waited = (await waiting).acquired;
  answer.told = told;
  connection.close();
  process.stdout.write(`${JSON.stringify(answer)}\n`, () => process.exit());
})();
