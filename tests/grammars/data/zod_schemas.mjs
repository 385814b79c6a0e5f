// Prints zod.json: schemas as zod 4 and zod-to-json-schema (of zod 3) write them. Run where both are
// installed: npm install zod@4.6.7 zod-to-json-schema@3.25.2; node zod_schemas.mjs | gzip -9n > zod.json.gz
import * as z4 from "zod";
import { z as z3 } from "zod/v3";
import { zodToJsonSchema } from "zod-to-json-schema";

const made = (z) => ({
  strings: z.object({
    any: z.string(), short: z.string().max(5), long: z.string().min(3).max(500), exact: z.string().length(8),
    email: z.string().email(), url: z.string().url(), uuid: z.string().uuid(), cuid: z.string().cuid(),
    cuid2: z.string().cuid2(), ulid: z.string().ulid(), datetime: z.string().datetime(),
    offset: z.string().datetime({ offset: true }), date: z.string().date(), time: z.string().time(),
    duration: z.string().duration(), base64: z.string().base64(), nanoid: z.string().nanoid(), emoji: z.string().emoji(),
    starts: z.string().startsWith("a.b"), ends: z.string().endsWith("c$"), includes: z.string().includes("x+y"),
    regex: z.string().regex(/^[A-Z]{2}-\d{4}$/), flags: z.string().regex(/^[a-z]+\/\w*$/i), trimmed: z.string().trim().min(1),
    password: z.string().regex(/^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{8,}$/), word: z.string().regex(/\bfoo\b/),
  }),
  email: z.object({ email: z.string().email() }),
  numbers: z.object({
    any: z.number(), int: z.number().int(), positive: z.number().positive(), negative: z.number().negative(),
    nonnegative: z.number().nonnegative(), fraction: z.number().gt(0).lt(1), percent: z.number().min(0).max(100),
    step: z.number().multipleOf(0.5), five: z.number().int().multipleOf(5), safe: z.number().int().safe(),
    between: z.number().gt(-0.25).lte(0.75), tiny: z.number().gt(0).max(1e-6), finite: z.number().finite(),
  }),
  positive_fraction: z.number().positive().max(0.5),
  negative_fraction: z.number().negative().min(-0.5),
  enums: z.object({
    e: z.enum(["red", "green", "blue"]), literal: z.literal("only"), number: z.literal(42), yes: z.literal(true),
    nothing: z.null(), mixed: z.union([z.literal("a"), z.literal(1), z.literal(false)]),
  }),
  optional: z.object({
    a: z.string().optional(), b: z.number().nullable(), c: z.boolean().nullish(), d: z.string().default("x"),
  }),
  arrays: z.object({
    any: z.array(z.string()), some: z.array(z.number()).min(1).max(4), exact: z.array(z.boolean()).length(2),
    nonempty: z.array(z.string()).nonempty(), nested: z.array(z.array(z.number().int())),
    tuple: z.tuple([z.string(), z.number()]), rest: z.tuple([z.string()]).rest(z.number()), set: z.set(z.number()),
  }),
  records: z.object({
    of: z.record(z.string(), z.number()), keyed: z.record(z.enum(["a", "b"]), z.boolean()),
    patterned: z.record(z.string().regex(/^x-/), z.string()), map: z.map(z.string(), z.number()),
  }),
  unions: z.object({
    either: z.union([z.string(), z.number(), z.boolean()]),
    shape: z.discriminatedUnion("kind", [
      z.object({ kind: z.literal("circle"), radius: z.number().positive() }),
      z.object({ kind: z.literal("square"), side: z.number().positive() }),
    ]),
    both: z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() })),
  }),
  strict: z.object({ a: z.string() }).strict(),
  passthrough: z.object({ a: z.string() }).passthrough(),
  catchall: z.object({ a: z.string() }).catchall(z.number()),
  any: z.object({ a: z.any(), b: z.unknown() }),
  described: z.object({ a: z.string().describe("A name") }).describe("Something"),
  ticket: z.object({
    title: z.string().min(1).max(120), priority: z.enum(["low", "high"]), tags: z.array(z.string()).max(5),
    assignee: z.object({ name: z.string(), email: z.string().email().optional() }).nullable(),
    due: z.string().datetime().optional(), points: z.number().int().min(0).max(21),
  }),
  recipe: z.object({
    name: z.string(), servings: z.number().int().positive(),
    ingredients: z.array(z.object({ item: z.string(), grams: z.number().nonnegative() })).min(1),
    steps: z.array(z.string()),
  }),
});

const of4 = (z) => {
  const tree = z.object({ value: z.number(), get children() { return z.array(tree); } });
  const list = z.object({ value: z.string(), get next() { return list.nullable(); } });
  return {
    ...made(z), tree, list, int32: z.int32(), uint32: z.uint32(), float32: z.float32(), float64: z.float64(),
    int: z.int(), guid: z.guid(), ipv4: z.ipv4(), ipv6: z.ipv6(), cidrv4: z.cidrv4(), cidrv6: z.cidrv6(), jwt: z.jwt(),
    base64url: z.base64url(), e164: z.e164(), hostname: z.hostname(), hex: z.hex(), iso_date: z.iso.date(),
    iso_datetime: z.iso.datetime(), iso_time: z.iso.time(), iso_duration: z.iso.duration(), emailed: z.email(),
    html5_email: z.email({ pattern: z.regexes.html5Email }), unicode_email: z.email({ pattern: z.regexes.unicodeEmail }),
    template: z.templateLiteral(["v", z.number(), ".", z.enum(["a", "b"])]), json: z.json(), loose: z.looseObject({ a: z.string() }),
    strict_object: z.strictObject({ a: z.string() }), partial_record: z.partialRecord(z.enum(["a", "b"]), z.number()),
    stringbool: z.stringbool(), nonoptional: z.object({ a: z.string().optional().nonoptional() }),
    file_meta: z.object({ size: z.int().nonnegative().max(2 ** 31), mime: z.string().regex(/^\w+\/[-+.\w]+$/) }),
  };
};

const of3 = (z) => {
  const tree = z.lazy(() => z.object({ value: z.number(), children: z.array(tree) }));
  const alternating = z.lazy(() => z.object({ next: z.lazy(() => z.object({ back: alternating.optional() })) }));
  return { ...made(z), tree, alternating, bigint: z.bigint().min(0n).max(2n ** 63n - 1n), day: z.date(), cidr: z.string().cidr(),
    ip: z.string().ip(), jwt: z.string().jwt(), native: z.nativeEnum({ A: 1, B: "b" }), branded: z.string().brand("id"),
    effects: z.string().transform((x) => x.length), pipeline: z.string().pipe(z.string().max(3)), readonly: z.array(z.string()).readonly() };
};

const found = {};
for (const [name, schema] of Object.entries(of4(z4))) {
  for (const io of ["input", "output"]) found[`zod4/${io}/${name}`] = z4.toJSONSchema(schema, { unrepresentable: "any", io });
  found[`zod4/draft-7/${name}`] = z4.toJSONSchema(schema, { unrepresentable: "any", target: "draft-7" });
  found[`zod4/openapi-3.0/${name}`] = z4.toJSONSchema(schema, { unrepresentable: "any", target: "openapi-3.0" });
}
for (const [name, schema] of Object.entries(of3(z3))) {
  for (const target of ["jsonSchema7", "jsonSchema2019-09", "openApi3", "openAi"]) {
    found[`zod3/${target}/${name}`] = zodToJsonSchema(schema, { target, name: target === "openApi3" ? undefined : "Answer" });
    found[`zod3/${target}/${name}/inline`] = zodToJsonSchema(schema, { target });
  }
}
console.log(JSON.stringify(found, (_, each) => (typeof each === "bigint" ? Number(each) : each)));
