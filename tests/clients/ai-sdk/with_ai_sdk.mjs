/*
 * Vercel's AI SDK: its providers of OpenAI, over Responses and over Chat Completions, of whatever is like OpenAI, and of
 * Anthropic. The rows are those of tests/clients/running.py, and so is the exit status.
 */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import net from "node:net";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateObject, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const URL = process.env.CLIENTS_GATEWAY;
const KEY = process.env.CLIENTS_KEY;
const VERSION = JSON.parse(readFileSync(new globalThis.URL("node_modules/ai/package.json", import.meta.url))).version;
const NONE_CHOSEN = 5;
const MODELS = ["chat", "claude", "responses"];
const QUESTION = "what is a bridge?";
const Place = z.object({ name: z.string(), inhabitants: z.number().int() });

globalThis.AI_SDK_LOG_WARNINGS = false;

// What it got as an answer it names afterwards, instead of sending it again, unless it is told that nobody keeps it.
const providerOptions = { openai: { store: false } };
const openai = (apiKey) => createOpenAI({ baseURL: `${URL}/v1`, apiKey });
const like = { name: "tollbridge", baseURL: `${URL}/v1`, includeUsage: true, supportsStructuredOutputs: true };
const KINDS = {
  responses: (model, key = KEY) => openai(key)(model),
  completions: (model, key = KEY) => openai(key).chat(model),
  compatible: (model, key = KEY) => createOpenAICompatible({ ...like, apiKey: key })(model),
  messages: (model, key = KEY) => createAnthropic({ baseURL: `${URL}/v1`, apiKey: key })(model),
};

/** Each kind over each protocol of a provider. */
function* every() {
  for (const [kind, made] of Object.entries(KINDS)) {
    for (const model of MODELS) yield [`${kind} ${model}`, made(model)];
  }
}

function weather(asked) {
  return tool({
    description: "The weather of a place.",
    inputSchema: z.object({ place: z.string() }),
    execute: ({ place }) => {
      asked.push(place);
      return `sunny in ${place}`;
    },
  });
}

/** The text of a stream to its end; an error in it is thrown. */
async function streamed(options) {
  let text = "";
  const result = streamText({ ...options, onError() {} });
  for await (const part of result.fullStream) {
    if (part.type === "error") throw Object.assign(part.error, { seen: text });
    if (part.type === "text-delta") text += part.text;
  }
  return [text, result];
}

const scenarios = {
  async a_chat_is_answered_with_its_usage_and_goes_on() {
    for (const [which, model] of every()) {
      const messages = [{ role: "user", content: QUESTION }];
      const answer = await generateText({ model, system: "You are an engineer.", messages });
      assert.ok(answer.text, which);
      assert.equal(answer.finishReason, "stop", which);
      assert.ok(answer.usage.outputTokens > 0, which);
      messages.push(...answer.response.messages, { role: "user", content: "and a river?" });
      assert.ok((await generateText({ model, messages, providerOptions })).text, which);
    }
  },

  async a_stream_is_the_whole_answer_with_its_usage() {
    for (const [which, model] of every()) {
      const [text, result] = await streamed({ model, prompt: QUESTION });
      assert.equal(text, (await generateText({ model, prompt: QUESTION })).text, which);
      assert.equal(await result.finishReason, "stop", which);
      assert.ok((await result.usage).outputTokens > 0, which);
    }
  },

  async tools_are_called_and_their_results_taken_back() {
    for (const [which, model] of every()) {
      const asked = [];
      const options = {
        model,
        prompt: "what is the weather in Bern?",
        tools: { weather: weather(asked) },
        stopWhen: stepCountIs(3),
      };
      const answer = await generateText(options);
      assert.match(answer.text, /sunny in Bern/, which);
      assert.equal(answer.steps.length, 2, which);
      const [text] = await streamed(options);
      assert.equal(text, answer.text, which);
      assert.deepEqual(asked, ["Bern", "Bern"], which);
    }
  },

  async a_tool_that_fails_is_told_to_the_model() {
    for (const [which, model] of every()) {
      const broken = tool({
        inputSchema: z.object({ place: z.string() }),
        execute: () => {
          throw new Error("no such town");
        },
      });
      const options = { model, prompt: "what is the weather in Bern?", tools: { weather: broken } };
      const answer = await generateText({ ...options, stopWhen: stepCountIs(3) });
      assert.match(answer.text, /no such town/, which);
    }
  },

  async structured_output_is_what_was_asked_for() {
    for (const [which, model] of every()) {
      const prompt = "what is Bern?";
      const { object } = await generateObject({ model, prompt, schema: Place });
      Place.parse(object);
      const output = Output.object({ schema: Place });
      assert.deepEqual((await generateText({ model, prompt, output })).output, object, which);
      const [, result] = await streamed({ model, prompt, output });
      assert.deepEqual(await result.output, object, which);
    }
  },

  async embeddings_come_in_order() {
    const model = openai(KEY).embedding("embed");
    const { embeddings, usage } = await embedMany({ model, values: ["a bridge", "a river"] });
    assert.equal(embeddings.length, 2);
    assert.notDeepEqual(embeddings[0], embeddings[1]);
    assert.ok(usage.tokens > 0);
  },

  async every_error_is_the_clients_own() {
    for (const [kind, made] of Object.entries(KINDS)) {
      for (const ask of [generateText, streamed]) {
        const refused = async (status, model, more) => {
          const error = await ask({ model, prompt: QUESTION, maxRetries: 0, ...more }).then(
            () => assert.fail(`${kind}: no error`),
            (error) => error,
          );
          assert.ok(APICallError.isInstance(error), `${kind}: ${error.stack}`);
          assert.equal(error.statusCode, status, `${kind}: ${error.message}`);
          return error;
        };
        const unknown = await refused(404, made("no-such-model"));
        assert.match(unknown.message, /no-such-model/, kind);
        assert.ok(!unknown.isRetryable, kind);
        await refused(401, made("chat", "tb_nobody"));
        assert.match((await refused(400, made("chat"), { topP: 7 })).message, /top_p/, kind);
        assert.ok((await refused(502, made("unwell"))).isRetryable, kind);
      }
    }
  },

  async a_stream_that_is_cut_is_an_error() {
    for (const [kind, made] of Object.entries(KINDS)) {
      for (const model of ["cut", "claude-cut"]) {
        const error = await streamed({ model: made(model), prompt: QUESTION, maxRetries: 0 }).then(
          () => assert.fail(`${kind} ${model} took a part for the whole`),
          (error) => error,
        );
        assert.ok(error.seen, `${kind} ${model}: ${error.stack}`);
      }
    }
  },
};

// ------------------------------------------------------------------ running

const strangers = [];
const connect = net.Socket.prototype.connect;
net.Socket.prototype.connect = function (...given) {
  const options = Array.isArray(given[0]) ? given[0][0] : given[0];
  const host = typeof options === "object" ? (options.host ?? "localhost") : (given[1] ?? "localhost");
  if (!["127.0.0.1", "::1", "localhost"].includes(host)) {
    strangers.push(host);
    throw new Error(`no other machine may be reached: ${host}`);
  }
  return connect.apply(this, given);
};

function row(name, result) {
  console.log([process.env.CLIENTS_NAME.padEnd(14), VERSION.padEnd(15), result.padEnd(12), name].join(" "));
}

const words = process.argv.slice(2);
const chosen = Object.entries(scenarios).filter(([name]) => !words.length || words.some((word) => name.includes(word)));
const athome = ["no_other_machine_was_reached", async () => assert.deepEqual(strangers, [])];
for (const [name, scenario] of chosen.length ? [...chosen, athome] : []) {
  const began = performance.now();
  try {
    await scenario();
    row(name, `ok ${((performance.now() - began) / 1000).toFixed(2).padStart(5)} s`);
  } catch (error) {
    process.exitCode = 1;
    row(name, "FAILED");
    console.log(error.stack);
    if (error.responseBody) console.log(error.responseBody);
  }
}
if (!chosen.length) process.exitCode = NONE_CHOSEN;
