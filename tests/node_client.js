// What tests/test_node.py runs: node node_client.js MODULES TARGET ROOT GOOGLEAPIS
// A client in Node that streams, cancels and reads errors; it prints what came, as a line of JSON for each call.
const [modules, target, root, googleapis] = process.argv.slice(2);
const { createRequire } = require("node:module");
const load = createRequire(`${modules}/`);
const grpc = load("@grpc/grpc-js");
const protoLoader = load("@grpc/proto-loader");

// Without keepCase the loader wants camelCase, and drops fields spelled as the .proto has them without a word.
const options = { keepCase: true, enums: String, longs: Number, includeDirs: [root, googleapis] };
const definition = protoLoader.loadSync("protos/pagewire/v1/generation.proto", options);
const { GenerationService } = grpc.loadPackageDefinition(definition).pagewire.v1;
const client = new GenerationService(target, grpc.credentials.createInsecure());

function stream(request, onMessage = () => {}) {
  return new Promise((resolve) => {
    const call = client.Generate(request);
    const texts = [];
    call.on("data", (message) => {
      texts.push(message.outputs[0].text);
      onMessage(call, texts.length);
    });
    call.on("error", (error) => resolve({ texts, code: grpc.status[error.code], error }));
    call.on("end", () => resolve({ texts, code: "OK" }));
  });
}

async function main() {
  const whole = await stream({ text: "p", stop: { max_tokens: 40 } });
  console.log(JSON.stringify(whole));
  const cancelled = await stream({ text: "p", stop: { max_tokens: 8000 } }, (call, count) => count === 3 && call.cancel());
  console.log(JSON.stringify({ texts: cancelled.texts, code: cancelled.code }));
  const late = await new Promise((resolve) => {
    const soon = { deadline: Date.now() + 200 };
    client.Complete({ text: "p", stop: { max_tokens: 8000 } }, soon, (error) => resolve(grpc.status[error.code]));
  });
  console.log(JSON.stringify({ code: late }));
  const refused = await stream({ text: "p", sampling: { top_p: 7 } });
  const details = refused.error.metadata.get("grpc-status-details-bin")[0];
  console.log(JSON.stringify({ code: refused.code, message: refused.error.details, details: details.toString("base64") }));
  client.close();
}

main();
