// The AI SDK of Vercel against a running server; clients.py runs it in a folder that has the packages.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.cwd()}/index.js`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, streamText, embedMany, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const name = process.env.CLIENTS_MODEL;
const provider = createOpenAICompatible({ name: "local", baseURL: process.env.OPENAI_BASE_URL });
const model = provider.chatModel(name);
const prompt = "Name a colour.";

const whole = await generateText({ model, prompt, maxOutputTokens: 16 });
let text = "";
for await (const part of streamText({ model, prompt, maxOutputTokens: 16 }).textStream) text += part;
if (!whole.text || !text) throw new Error("an answer is empty");
const weather = tool({ description: "The weather of a city", inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }) });
const called = await generateText({ model, prompt, tools: { weather }, toolChoice: "required", maxOutputTokens: 100 });
if (!["Paris", "Rome"].includes(called.toolCalls[0].input.city)) throw new Error("no call");
const { embeddings } = await embedMany({ model: provider.textEmbeddingModel(name), values: ["a", "b"] });
if (embeddings.length !== 2) throw new Error("no vectors");
console.log(JSON.stringify(called.toolCalls[0].input));
