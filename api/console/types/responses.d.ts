// Types of responses by path, from the OpenAPI document. `npm run types` writes api.d.ts.

import type { paths } from "./api";

type Json<Operation> = Operation extends { responses: { 200: { content: { "application/json": infer Body } } } }
  ? Body
  : any;

export type ResponseOf<Path extends string> = Path extends keyof paths ? Json<paths[Path]["get"]> : any;
