// The first hour's calls against the types that openapi-typescript generated. It is compiled, not run: an answer that the
// document no longer describes, or a path that is gone, fails the compilation.
import type { components, operations, paths } from "./generated/schema.js";

type Answer<Operation extends keyof operations, Status extends keyof operations[Operation]["responses"]> =
  operations[Operation]["responses"][Status] extends { content: { "application/json": infer Body } } ? Body : never;

const job: components["schemas"]["JobDocument"] = {
  name: "hello",
  gpus: { min: 1, max: 2 },
  command: ["sleep", "600"],
};

export function nameStates(page: Answer<"list_jobs", 200>): string[] {
  return page.items.map((each) => `${each.id} ${each.state} ${each.gpus.target}`);
}

export function findNext(page: Answer<"list_events", 200>): string | null {
  return page.next;
}

export function listGpus(page: Answer<"list_nodes", 200>): number[] {
  return page.items.map((node) => node.gpus);
}

export function describeProblem(problem: components["schemas"]["Problem"]): string {
  return problem.errors?.map((each) => each.message).join("; ") ?? problem.detail;
}

export async function submit(url: string, token: string): Promise<Answer<"submit_job", 201>> {
  const path: keyof paths = "/v1/jobs";
  const response = await fetch(url + path, {
    method: "POST",
    headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" },
    body: JSON.stringify(job),
  });
  return (await response.json()) as Answer<"submit_job", 201>;
}

export function repeatCreation(first: Answer<"create_pool", 201>, again: Answer<"create_pool", 200>): boolean {
  return first.name === again.name;
}
