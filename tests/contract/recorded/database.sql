BEGIN TRANSACTION;
CREATE TABLE agent_reports (
	job_id VARCHAR NOT NULL, 
	node VARCHAR NOT NULL, 
	at_s DOUBLE NOT NULL, 
	generation BIGINT NOT NULL, 
	body JSON NOT NULL, 
	CONSTRAINT pk_agent_reports PRIMARY KEY (job_id, node)
);
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0012');
CREATE TABLE api_tokens (
	id VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	prefix VARCHAR NOT NULL, 
	digest VARCHAR NOT NULL, 
	grants JSON NOT NULL, 
	created_at_s DOUBLE NOT NULL, 
	created_by VARCHAR NOT NULL, 
	expires_at_s DOUBLE, 
	last_used_at_s DOUBLE, 
	revoked_at_s DOUBLE, 
	CONSTRAINT pk_api_tokens PRIMARY KEY (id)
);
INSERT INTO "api_tokens" VALUES('tok-501fdd07548d','root','ebk_tHlUZo','b6dd1e13aafc9b11583213e40cb8a413cbd862427254633cb1a1eccbad03f0a7','["admin"]',1760000000.0,'tests',NULL,1760000000.0,NULL);
INSERT INTO "api_tokens" VALUES('tok-753ee142359c','ci','ebk_VP9Rwk','929c2e479b038dee48caf05dd4f653bcba066c661b2bc3e64c5d87da04ecb68b','["viewer"]',1760000005.0,'root',NULL,NULL,NULL);
CREATE TABLE audit_log (
	number INTEGER NOT NULL, 
	at_s DOUBLE NOT NULL, 
	actor VARCHAR NOT NULL, 
	token_id VARCHAR NOT NULL, 
	action VARCHAR NOT NULL, 
	subject VARCHAR NOT NULL, 
	"before" JSON, 
	"after" JSON, 
	request_id VARCHAR NOT NULL, 
	outcome VARCHAR NOT NULL, 
	CONSTRAINT pk_audit_log PRIMARY KEY (number)
);
INSERT INTO "audit_log" VALUES(1,1760000000.0,'tests','','CreateToken','',NULL,NULL,'','accepted');
INSERT INTO "audit_log" VALUES(2,1760000000.0,'root','tok-501fdd07548d','CreatePool','training',NULL,'{"name":"training","kind":"training","lending":{"enabled":true,"quantile":0.999,"headroom":0.02,"return_deadline_s":300.0,"cold_start_s":300.0,"kept_nodes_min":0,"lent_nodes_max":null,"loan_s_min":0.0,"blackouts":[],"demand_stale_s":null}}','b1c8c25abc226b44','accepted');
INSERT INTO "audit_log" VALUES(3,1760000000.0,'root','tok-501fdd07548d','CreatePool','empty',NULL,'{"name":"empty","kind":"training","lending":{"enabled":true,"quantile":0.999,"headroom":0.02,"return_deadline_s":300.0,"cold_start_s":300.0,"kept_nodes_min":0,"lent_nodes_max":null,"loan_s_min":0.0,"blackouts":[],"demand_stale_s":null}}','76e66284d661067d','accepted');
INSERT INTO "audit_log" VALUES(4,1760000000.0,'root','tok-501fdd07548d','CreatePool','inference',NULL,'{"name":"inference","kind":"inference","lending":{"enabled":true,"quantile":0.999,"headroom":0.0,"return_deadline_s":300.0,"cold_start_s":300.0,"kept_nodes_min":0,"lent_nodes_max":null,"loan_s_min":0.0,"blackouts":[],"demand_stale_s":null}}','22fca84aaf7d2b27','accepted');
INSERT INTO "audit_log" VALUES(5,1760000000.0,'root','tok-501fdd07548d','AddNode','t0',NULL,'{"name":"t0","pool":"training","gpu":"cpu","gpus":2,"gpu_memory_bytes":2000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}','15836320026cace7','accepted');
INSERT INTO "audit_log" VALUES(6,1760000000.0,'root','tok-501fdd07548d','AddNode','t1',NULL,'{"name":"t1","pool":"training","gpu":"cpu","gpus":2,"gpu_memory_bytes":2000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}','8ce19ae6609b9ffa','accepted');
INSERT INTO "audit_log" VALUES(7,1760000000.0,'root','tok-501fdd07548d','AddNode','i0',NULL,'{"name":"i0","pool":"inference","gpu":"cpu","gpus":2,"gpu_memory_bytes":2000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}','ed80d9fbd818a082','accepted');
INSERT INTO "audit_log" VALUES(8,1760000000.0,'root','tok-501fdd07548d','AddNode','i1',NULL,'{"name":"i1","pool":"inference","gpu":"cpu","gpus":2,"gpu_memory_bytes":2000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}','26068b324364a04a','accepted');
INSERT INTO "audit_log" VALUES(9,1760000000.0,'root','tok-501fdd07548d','CreateQueue','blue',NULL,'{"name":"blue","guaranteed_gpus":1,"limit_gpus":null,"weight":1.0,"user_limit_gpus":null,"user_jobs_max":null}','433519cbc4d97a5d','accepted');
INSERT INTO "audit_log" VALUES(10,1760000000.0,'root','tok-501fdd07548d','SubmitJob','running-m4hpq2kol2',NULL,'{"intent":"run","name":"running","gpus":{"min":2,"max":2},"queue":"blue","priority":0,"steps":1000,"retries":3,"command":[],"env":{},"checkpoint":{"dir":"","interval":900.0,"keep":2},"fungible":true}','1a8c7d93d373acde','accepted');
INSERT INTO "audit_log" VALUES(11,1760000000.0,'root','tok-501fdd07548d','SubmitJob','asleep-n62jlmriio',NULL,'{"intent":"run","name":"asleep","gpus":{"min":1,"max":2},"queue":"default","priority":0,"steps":1000,"retries":3,"command":[],"env":{},"checkpoint":{"dir":"","interval":900.0,"keep":2},"fungible":true}','7b4bc6d81ea83620','accepted');
INSERT INTO "audit_log" VALUES(12,1760000000.0,'root','tok-501fdd07548d','SubmitJob','gone-en5khaksjc',NULL,'{"intent":"run","name":"gone","gpus":{"min":1,"max":2},"queue":"default","priority":0,"steps":1000,"retries":3,"command":[],"env":{},"checkpoint":{"dir":"","interval":900.0,"keep":2},"fungible":true}','3ce2ac8c14beff49','accepted');
INSERT INTO "audit_log" VALUES(13,1760000000.0,'root','tok-501fdd07548d','SuspendJob','asleep-n62jlmriio','{"intent":"run"}','{"intent":"suspend"}','50950744d757457c','accepted');
INSERT INTO "audit_log" VALUES(14,1760000000.0,'root','tok-501fdd07548d','CancelJob','gone-en5khaksjc','{"intent":"run"}','{"intent":"cancel"}','4082eb70c9076930','accepted');
INSERT INTO "audit_log" VALUES(15,1760000000.0,'root','tok-501fdd07548d','SubmitJob','train-nbcsayeioq',NULL,'{"intent":"run","name":"train","gpus":{"min":4,"max":4},"queue":"default","priority":0,"steps":1000,"retries":3,"command":[],"env":{},"checkpoint":{"dir":"","interval":900.0,"keep":2},"fungible":true}','8f0b2e77e7a516c1','accepted');
INSERT INTO "audit_log" VALUES(16,1760000000.0,'root','tok-501fdd07548d','ReportDemand','inference',NULL,'{"at_s":1760000000.0,"gpus":0.0,"asked_gpus":0.0}','523f5a088b5f3521','accepted');
INSERT INTO "audit_log" VALUES(17,1760000003.0,'root','tok-501fdd07548d','SubmitJob','waiting-mdx5yxgbqr',NULL,'{"intent":"run","name":"waiting","gpus":{"min":64,"max":64},"queue":"default","priority":0,"steps":1000,"retries":3,"command":[],"env":{},"checkpoint":{"dir":"","interval":900.0,"keep":2},"fungible":true}','264aaf5296b8e871','accepted');
INSERT INTO "audit_log" VALUES(18,1760000004.0,'root','tok-501fdd07548d','AddNode','spare',NULL,'{"name":"spare","pool":"training","gpu":"cpu","gpus":1,"gpu_memory_bytes":2000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}','0f47351ba4aa382a','accepted');
INSERT INTO "audit_log" VALUES(19,1760000004.0,'root','tok-501fdd07548d','CordonNode','spare','{"cordoned":false}','{"cordoned":true}','b6a71332d97c2dc4','accepted');
INSERT INTO "audit_log" VALUES(20,1760000005.0,'root','tok-501fdd07548d','CreateToken','tok-753ee142359c',NULL,'{"name":"ci","grants":["viewer"],"expires_at_s":null}','675cf48bbec4bca2','accepted');
INSERT INTO "audit_log" VALUES(21,1760000005.0,'anybody','','AddNode','a0',NULL,'{"name":"a0","pool":"training","gpu":"a100-80g","gpus":8,"gpu_memory_bytes":80000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}','8d4fb68991daeb64','accepted');
INSERT INTO "audit_log" VALUES(22,1760000005.0,'anybody','','SubmitJob','planned-fa2zewygty',NULL,'{"intent":"run","name":"planned","gpus":{"min":2,"max":8},"queue":"default","priority":0,"model":"gpt2","globalBatch":64,"steps":1000,"retries":3,"command":[],"env":{},"checkpoint":{"dir":"","interval":900.0,"keep":2},"fungible":true}','70830ca8ec6c48a0','accepted');
CREATE TABLE begun_runs (
	job_id VARCHAR NOT NULL, 
	generation BIGINT NOT NULL, 
	body JSON NOT NULL, 
	doom JSON, 
	ended JSON, 
	CONSTRAINT pk_begun_runs PRIMARY KEY (job_id, generation)
);
INSERT INTO "begun_runs" VALUES('planned-fa2zewygty',1,'{"job_id":"planned-fa2zewygty","generation":1,"gpus":{"a0":[0,1,2,3,4,5,6,7]},"seats":[["a0",0],["a0",1],["a0",2],["a0",3],["a0",4],["a0",5],["a0",6],["a0",7]],"begun_at_s":1760000009.0,"pods":{"a0":"p1"},"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":1,"micro_batch_size":64,"iteration_time_s":0.06318779625515257,"samples_per_s":1012.8538071112299,"peak_bytes_per_gpu":10401075784,"stages":[{"first_layer":0,"last_layer":11,"gpu":"a100-80g","gpus":8,"strategies":[{"layers":11,"tp":1,"sequence_sharding":false,"dp":8,"zero":3,"shard_group":8,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false},{"layers":1,"tp":2,"sequence_sharding":true,"dp":4,"zero":3,"shard_group":4,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0},"frozen_layers":0,"doom":null,"end":null}',NULL,NULL);
CREATE TABLE creation_keys (
	id VARCHAR NOT NULL, 
	document VARCHAR NOT NULL, 
	made VARCHAR NOT NULL, 
	CONSTRAINT pk_creation_keys PRIMARY KEY (id)
);
CREATE TABLE curve_points (
	curve_key VARCHAR NOT NULL, 
	shape VARCHAR NOT NULL, 
	generation BIGINT NOT NULL, 
	body JSON, 
	CONSTRAINT pk_curve_points PRIMARY KEY (curve_key, shape)
);
INSERT INTO "curve_points" VALUES('gpt2/batch-64/seq-0','{"groups":[{"gpu":"a100-80g","nodes":1,"gpus_per_node":2}]}',7,'{"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":1,"micro_batch_size":64,"iteration_time_s":0.20933463870158778,"samples_per_s":305.7305775908102,"peak_bytes_per_gpu":34394643976,"stages":[{"first_layer":0,"last_layer":11,"gpu":"a100-80g","gpus":2,"strategies":[{"layers":11,"tp":1,"sequence_sharding":false,"dp":2,"zero":3,"shard_group":2,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false},{"layers":1,"tp":2,"sequence_sharding":true,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0},"infeasible":""}');
INSERT INTO "curve_points" VALUES('gpt2/batch-64/seq-0','{"groups":[{"gpu":"a100-80g","nodes":1,"gpus_per_node":3}]}',7,'{"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":1,"micro_batch_size":64,"iteration_time_s":0.19449388521639166,"samples_per_s":329.0591883070994,"peak_bytes_per_gpu":27657585434,"stages":[{"first_layer":0,"last_layer":11,"gpu":"a100-80g","gpus":3,"strategies":[{"layers":12,"tp":3,"sequence_sharding":false,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0},"infeasible":""}');
INSERT INTO "curve_points" VALUES('gpt2/batch-64/seq-0','{"groups":[{"gpu":"a100-80g","nodes":1,"gpus_per_node":4}]}',7,'{"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":1,"micro_batch_size":64,"iteration_time_s":0.10816346343412561,"samples_per_s":591.6970293668312,"peak_bytes_per_gpu":18396498345,"stages":[{"first_layer":0,"last_layer":11,"gpu":"a100-80g","gpus":4,"strategies":[{"layers":11,"tp":1,"sequence_sharding":false,"dp":4,"zero":3,"shard_group":4,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false},{"layers":1,"tp":2,"sequence_sharding":true,"dp":2,"zero":3,"shard_group":2,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0},"infeasible":""}');
INSERT INTO "curve_points" VALUES('gpt2/batch-64/seq-0','{"groups":[{"gpu":"a100-80g","nodes":1,"gpus_per_node":5}]}',7,'{"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":8,"micro_batch_size":8,"iteration_time_s":0.3145421393328065,"samples_per_s":203.47035260761592,"peak_bytes_per_gpu":8156037817,"stages":[{"first_layer":0,"last_layer":0,"gpu":"a100-80g","gpus":1,"strategies":[{"layers":1,"tp":1,"sequence_sharding":false,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]},{"first_layer":1,"last_layer":1,"gpu":"a100-80g","gpus":1,"strategies":[{"layers":1,"tp":1,"sequence_sharding":false,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]},{"first_layer":2,"last_layer":2,"gpu":"a100-80g","gpus":1,"strategies":[{"layers":1,"tp":1,"sequence_sharding":false,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]},{"first_layer":3,"last_layer":10,"gpu":"a100-80g","gpus":1,"strategies":[{"layers":8,"tp":1,"sequence_sharding":false,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]},{"first_layer":11,"last_layer":11,"gpu":"a100-80g","gpus":1,"strategies":[{"layers":1,"tp":1,"sequence_sharding":false,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0},"infeasible":""}');
INSERT INTO "curve_points" VALUES('gpt2/batch-64/seq-0','{"groups":[{"gpu":"a100-80g","nodes":1,"gpus_per_node":6}]}',7,'{"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":1,"micro_batch_size":64,"iteration_time_s":0.10387194110215182,"samples_per_s":616.1432945309055,"peak_bytes_per_gpu":14921286651,"stages":[{"first_layer":0,"last_layer":11,"gpu":"a100-80g","gpus":6,"strategies":[{"layers":12,"tp":3,"sequence_sharding":false,"dp":2,"zero":3,"shard_group":2,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0},"infeasible":""}');
INSERT INTO "curve_points" VALUES('gpt2/batch-64/seq-0','{"groups":[{"gpu":"a100-80g","nodes":1,"gpus_per_node":7}]}',7,'{"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":8,"micro_batch_size":8,"iteration_time_s":0.31503166206122757,"samples_per_s":203.15418323749745,"peak_bytes_per_gpu":8156037817,"stages":[{"first_layer":0,"last_layer":0,"gpu":"a100-80g","gpus":1,"strategies":[{"layers":1,"tp":1,"sequence_sharding":false,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]},{"first_layer":1,"last_layer":1,"gpu":"a100-80g","gpus":1,"strategies":[{"layers":1,"tp":1,"sequence_sharding":false,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]},{"first_layer":2,"last_layer":2,"gpu":"a100-80g","gpus":1,"strategies":[{"layers":1,"tp":1,"sequence_sharding":false,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]},{"first_layer":3,"last_layer":3,"gpu":"a100-80g","gpus":1,"strategies":[{"layers":1,"tp":1,"sequence_sharding":false,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]},{"first_layer":4,"last_layer":4,"gpu":"a100-80g","gpus":1,"strategies":[{"layers":1,"tp":1,"sequence_sharding":false,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]},{"first_layer":5,"last_layer":10,"gpu":"a100-80g","gpus":1,"strategies":[{"layers":6,"tp":1,"sequence_sharding":false,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]},{"first_layer":11,"last_layer":11,"gpu":"a100-80g","gpus":1,"strategies":[{"layers":1,"tp":1,"sequence_sharding":false,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0},"infeasible":""}');
INSERT INTO "curve_points" VALUES('gpt2/batch-64/seq-0','{"groups":[{"gpu":"a100-80g","nodes":1,"gpus_per_node":8}]}',7,'{"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":1,"micro_batch_size":64,"iteration_time_s":0.06318779625515257,"samples_per_s":1012.8538071112299,"peak_bytes_per_gpu":10401075784,"stages":[{"first_layer":0,"last_layer":11,"gpu":"a100-80g","gpus":8,"strategies":[{"layers":11,"tp":1,"sequence_sharding":false,"dp":8,"zero":3,"shard_group":8,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false},{"layers":1,"tp":2,"sequence_sharding":true,"dp":4,"zero":3,"shard_group":4,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0},"infeasible":""}');
INSERT INTO "curve_points" VALUES('gpt2/batch-64/seq-0','{"groups":[{"gpu":"cpu","nodes":2,"gpus_per_node":2}]}',7,'{"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":64,"micro_batch_size":1,"iteration_time_s":196.77620465066664,"samples_per_s":0.32524257754446523,"peak_bytes_per_gpu":1976115968,"stages":[{"first_layer":0,"last_layer":11,"gpu":"cpu","gpus":4,"strategies":[{"layers":2,"tp":2,"sequence_sharding":true,"dp":1,"zero":1,"shard_group":2,"ulysses":1,"ring":2,"ep":1,"recompute":"none","offload":false},{"layers":9,"tp":1,"sequence_sharding":false,"dp":1,"zero":1,"shard_group":4,"ulysses":4,"ring":1,"ep":1,"recompute":"none","offload":false},{"layers":1,"tp":2,"sequence_sharding":true,"dp":1,"zero":1,"shard_group":2,"ulysses":1,"ring":2,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0005003199129087754},"infeasible":""}');
INSERT INTO "curve_points" VALUES('gpt2/batch-64/seq-0','{"groups":[{"gpu":"cpu","nodes":3,"gpus_per_node":2}]}',7,'{"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":64,"micro_batch_size":1,"iteration_time_s":137.24977879300005,"samples_per_s":0.46630311948644176,"peak_bytes_per_gpu":1735128320,"stages":[{"first_layer":0,"last_layer":4,"gpu":"cpu","gpus":2,"strategies":[{"layers":1,"tp":2,"sequence_sharding":true,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false},{"layers":4,"tp":1,"sequence_sharding":false,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":2,"ep":1,"recompute":"none","offload":false}]},{"first_layer":5,"last_layer":10,"gpu":"cpu","gpus":2,"strategies":[{"layers":6,"tp":1,"sequence_sharding":false,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":2,"ep":1,"recompute":"none","offload":false}]},{"first_layer":11,"last_layer":11,"gpu":"cpu","gpus":2,"strategies":[{"layers":1,"tp":2,"sequence_sharding":true,"dp":1,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":2.347136751934542e-05},"infeasible":""}');
INSERT INTO "curve_points" VALUES('gpt2/batch-64/seq-0','{"groups":[{"gpu":"cpu","nodes":4,"gpus_per_node":2}]}',7,'{"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":16,"micro_batch_size":4,"iteration_time_s":96.53130754133333,"samples_per_s":0.6629973386882396,"peak_bytes_per_gpu":1994838272,"stages":[{"first_layer":0,"last_layer":11,"gpu":"cpu","gpus":8,"strategies":[{"layers":1,"tp":2,"sequence_sharding":true,"dp":4,"zero":2,"shard_group":4,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false},{"layers":11,"tp":2,"sequence_sharding":true,"dp":4,"zero":1,"shard_group":4,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0006718526797349078},"infeasible":""}');
INSERT INTO "curve_points" VALUES('gpt2/batch-64/seq-0','{"groups":[{"gpu":"cpu","nodes":1,"gpus_per_node":2}]}',7,'{"plan":null,"infeasible":"needs 2.2 GB of 2.0 GB per GPU of cpu at tp=2, pp=1, recompute=full, 64 micro-batches of 1, the leanest plan with one strategy per stage; it would fit in 2.2 GB per GPU, or on 2x2 cpu"}');
CREATE TABLE decisions (
	number INTEGER NOT NULL, 
	generation BIGINT NOT NULL, 
	at_s DOUBLE NOT NULL, 
	body JSON NOT NULL, 
	CONSTRAINT pk_decisions PRIMARY KEY (number)
);
INSERT INTO "decisions" VALUES(1,1,1760000001.0,'{"kind":"SuspendRun","job_id":"asleep-n62jlmriio","leave_by_s":1760000061.0,"reason":{"code":"OwnerAsked","detail":"suspended by its owner","numbers":{}}}');
INSERT INTO "decisions" VALUES(2,1,1760000001.0,'{"kind":"StopJob","job_id":"gone-en5khaksjc","leave_by_s":1760000001.0,"reason":{"code":"OwnerAsked","detail":"cancelled by its owner","numbers":{}}}');
INSERT INTO "decisions" VALUES(3,1,1760000001.0,'{"kind":"LendNode","node":"i0","reason":{"code":"InferenceIdle","detail":"inference uses 0.00 of 4 GPUs and needs at most 0.00 within 600 s: it can lend 2 nodes","numbers":{"capacity_gpus":4.0,"observed_gpus":0.0,"needed_gpus":0.0,"lendable_nodes":2.0}}}');
INSERT INTO "decisions" VALUES(4,1,1760000001.0,'{"kind":"LendNode","node":"i1","reason":{"code":"InferenceIdle","detail":"inference uses 0.00 of 4 GPUs and needs at most 0.00 within 600 s: it can lend 2 nodes","numbers":{"capacity_gpus":4.0,"observed_gpus":0.0,"needed_gpus":0.0,"lendable_nodes":2.0}}}');
INSERT INTO "decisions" VALUES(5,1,1760000001.0,'{"kind":"StartJob","job_id":"running-m4hpq2kol2","gpus":{"t0":[0,1]},"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":1,"micro_batch_size":1,"iteration_time_s":0.5,"samples_per_s":2.0,"peak_bytes_per_gpu":0,"stages":[{"first_layer":0,"last_layer":0,"gpu":"cpu","gpus":2,"strategies":[{"layers":1,"tp":1,"sequence_sharding":false,"dp":2,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0},"reason":{"code":"FirstInOrder","detail":"next in order; 2 GPUs on t0[0-1] as dp2 \u00b7 1 micro-batch","numbers":{}}}');
INSERT INTO "decisions" VALUES(6,2,1760000002.0,'{"kind":"StartJob","job_id":"train-nbcsayeioq","gpus":{"t1":[0,1],"i0":[0,1]},"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":1,"micro_batch_size":1,"iteration_time_s":0.25,"samples_per_s":4.0,"peak_bytes_per_gpu":0,"stages":[{"first_layer":0,"last_layer":0,"gpu":"cpu","gpus":4,"strategies":[{"layers":1,"tp":1,"sequence_sharding":false,"dp":4,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0},"reason":{"code":"FirstInOrder","detail":"next in order; 4 GPUs on i0[0-1] t1[0-1] as dp4 \u00b7 1 micro-batch","numbers":{}}}');
INSERT INTO "decisions" VALUES(7,7,1760000007.0,'{"kind":"StartJob","job_id":"planned-fa2zewygty","gpus":{"a0":[0,1,2,3,4,5,6,7]},"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":1,"micro_batch_size":64,"iteration_time_s":0.06318779625515257,"samples_per_s":1012.8538071112299,"peak_bytes_per_gpu":10401075784,"stages":[{"first_layer":0,"last_layer":11,"gpu":"a100-80g","gpus":8,"strategies":[{"layers":11,"tp":1,"sequence_sharding":false,"dp":8,"zero":3,"shard_group":8,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false},{"layers":1,"tp":2,"sequence_sharding":true,"dp":4,"zero":3,"shard_group":4,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0},"reason":{"code":"FirstInOrder","detail":"next in order; 8 GPUs on a0[0-7] as dp8 fsdp \u00b7 1 micro-batch","numbers":{}}}');
CREATE TABLE demand (
	"key" VARCHAR NOT NULL, 
	generation BIGINT NOT NULL, 
	body JSON, 
	CONSTRAINT pk_demand PRIMARY KEY ("key")
);
INSERT INTO "demand" VALUES('inference',1,'{"at_s":1760000000.0,"gpus":0.0,"asked_gpus":0.0}');
CREATE TABLE ended_jobs (
	number INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	generation BIGINT NOT NULL, 
	body JSON NOT NULL, submitted_at_s DOUBLE DEFAULT '0' NOT NULL, state VARCHAR DEFAULT '' NOT NULL, queue VARCHAR DEFAULT '' NOT NULL, owner VARCHAR DEFAULT '' NOT NULL, name VARCHAR DEFAULT '' NOT NULL, 
	CONSTRAINT pk_ended_jobs PRIMARY KEY (number)
);
INSERT INTO "ended_jobs" VALUES(1,'gone-en5khaksjc',1,'{"id":"gone-en5khaksjc","spec":{"name":"gone","min_gpus":1,"max_gpus":2,"queue":"default","priority":0,"gpu":"","model":"","profile_json":"","global_batch":0,"sequence_length":0,"steps":1000,"duration_estimate_s":null,"deadline_s":null,"run_time_s_max":null,"retries":3,"command":[],"image":"","env":{},"checkpoint":{"dir":"","interval_s":900.0,"keep":2,"volume":null},"fungible":true,"namespace":"","template_json":"","resource_uid":""},"state":"cancelled","submitted_at_s":1760000000.0,"state_since_s":1760000001.0,"progress":{"at_s":1760000001.0,"steps":0.0,"checkpoint_steps":0.0,"checkpoint_at_s":1760000001.0,"correction":1.0,"loss":null,"corrections":[],"samples_per_s":null,"peak_bytes":null},"account":{"waited_s":1.0,"gpu_s":0.0,"lost_gpu_s":0.0,"failures":0,"preemptions":0,"resizes":0,"first_started_at_s":null,"settled_at_s":1760000001.0},"allocation":{"generation":1,"target":{},"releasing":{},"plan":null,"leave_by_s":1760000001.0,"asked_at_generation":1,"seats":[]},"intent":"cancel","message":"cancelled by its owner","memory":{"percent":100,"deaths":[],"retry_at_s":null},"freezing":{"layers":0,"curve_layers":0,"at_s":0.0,"correction":null},"replan":{"generation":0,"left_s":{}},"owner":"root","save_wish":null,"sampled":null}',1760000000.0,'cancelled','default','root','gone');
CREATE TABLE ended_loans (
	number INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	generation BIGINT NOT NULL, 
	body JSON NOT NULL, offered_at_s DOUBLE DEFAULT '0' NOT NULL, state VARCHAR DEFAULT '' NOT NULL, pool VARCHAR DEFAULT '' NOT NULL, node VARCHAR DEFAULT '' NOT NULL, 
	CONSTRAINT pk_ended_loans PRIMARY KEY (number)
);
CREATE TABLE events (
	number INTEGER NOT NULL, 
	generation BIGINT NOT NULL, 
	at_s DOUBLE NOT NULL, 
	subject VARCHAR NOT NULL, 
	body JSON NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (number)
);
INSERT INTO "events" VALUES(1,1,1760000001.0,'training','{"at_s":1760000001.0,"code":"PoolChanged","subject":"training","message":"training pool training was created","numbers":{},"cause":"","job":null}');
INSERT INTO "events" VALUES(2,1,1760000001.0,'empty','{"at_s":1760000001.0,"code":"PoolChanged","subject":"empty","message":"training pool empty was created","numbers":{},"cause":"","job":null}');
INSERT INTO "events" VALUES(3,1,1760000001.0,'inference','{"at_s":1760000001.0,"code":"PoolChanged","subject":"inference","message":"inference pool inference was created","numbers":{},"cause":"","job":null}');
INSERT INTO "events" VALUES(4,1,1760000001.0,'t0','{"at_s":1760000001.0,"code":"NodeChanged","subject":"t0","message":"t0 joined pool training: 2 GPUs","numbers":{},"cause":"","job":null}');
INSERT INTO "events" VALUES(5,1,1760000001.0,'t1','{"at_s":1760000001.0,"code":"NodeChanged","subject":"t1","message":"t1 joined pool training: 2 GPUs","numbers":{},"cause":"","job":null}');
INSERT INTO "events" VALUES(6,1,1760000001.0,'i0','{"at_s":1760000001.0,"code":"NodeChanged","subject":"i0","message":"i0 joined pool inference: 2 GPUs","numbers":{},"cause":"","job":null}');
INSERT INTO "events" VALUES(7,1,1760000001.0,'i1','{"at_s":1760000001.0,"code":"NodeChanged","subject":"i1","message":"i1 joined pool inference: 2 GPUs","numbers":{},"cause":"","job":null}');
INSERT INTO "events" VALUES(8,1,1760000001.0,'blue','{"at_s":1760000001.0,"code":"QueueChanged","subject":"blue","message":"queue blue: 1 GPUs guaranteed, no limit, weight 1","numbers":{},"cause":"","job":null}');
INSERT INTO "events" VALUES(9,1,1760000001.0,'running-m4hpq2kol2','{"at_s":1760000001.0,"code":"JobState","subject":"running-m4hpq2kol2","message":"submitted: running, 2 to 2 GPUs","numbers":{},"cause":"","job":{"state":"submitted","generation":0,"gpus":0,"lent_gpus":0,"plan":""}}');
INSERT INTO "events" VALUES(10,1,1760000001.0,'asleep-n62jlmriio','{"at_s":1760000001.0,"code":"JobState","subject":"asleep-n62jlmriio","message":"submitted: asleep, 1 to 2 GPUs","numbers":{},"cause":"","job":{"state":"submitted","generation":0,"gpus":0,"lent_gpus":0,"plan":""}}');
INSERT INTO "events" VALUES(11,1,1760000001.0,'gone-en5khaksjc','{"at_s":1760000001.0,"code":"JobState","subject":"gone-en5khaksjc","message":"submitted: gone, 1 to 2 GPUs","numbers":{},"cause":"","job":{"state":"submitted","generation":0,"gpus":0,"lent_gpus":0,"plan":""}}');
INSERT INTO "events" VALUES(12,1,1760000001.0,'train-nbcsayeioq','{"at_s":1760000001.0,"code":"JobState","subject":"train-nbcsayeioq","message":"submitted: train, 4 to 4 GPUs","numbers":{},"cause":"","job":{"state":"submitted","generation":0,"gpus":0,"lent_gpus":0,"plan":""}}');
INSERT INTO "events" VALUES(13,1,1760000001.0,'running-m4hpq2kol2','{"at_s":1760000001.0,"code":"JobState","subject":"running-m4hpq2kol2","message":"submitted -> queued","numbers":{},"cause":"queued","job":{"state":"queued","generation":0,"gpus":0,"lent_gpus":0,"plan":""}}');
INSERT INTO "events" VALUES(14,1,1760000001.0,'asleep-n62jlmriio','{"at_s":1760000001.0,"code":"JobState","subject":"asleep-n62jlmriio","message":"submitted -> queued","numbers":{},"cause":"queued","job":{"state":"queued","generation":0,"gpus":0,"lent_gpus":0,"plan":""}}');
INSERT INTO "events" VALUES(15,1,1760000001.0,'gone-en5khaksjc','{"at_s":1760000001.0,"code":"JobState","subject":"gone-en5khaksjc","message":"submitted -> queued","numbers":{},"cause":"queued","job":{"state":"queued","generation":0,"gpus":0,"lent_gpus":0,"plan":""}}');
INSERT INTO "events" VALUES(16,1,1760000001.0,'train-nbcsayeioq','{"at_s":1760000001.0,"code":"JobState","subject":"train-nbcsayeioq","message":"submitted -> queued","numbers":{},"cause":"queued","job":{"state":"queued","generation":0,"gpus":0,"lent_gpus":0,"plan":""}}');
INSERT INTO "events" VALUES(17,1,1760000001.0,'asleep-n62jlmriio','{"at_s":1760000001.0,"code":"JobSuspended","subject":"asleep-n62jlmriio","message":"suspended by its owner","numbers":{"leave_by_s":1760000061.0},"cause":"OwnerAsked","job":{"state":"suspended","generation":1,"gpus":0,"lent_gpus":0,"plan":""}}');
INSERT INTO "events" VALUES(18,1,1760000001.0,'gone-en5khaksjc','{"at_s":1760000001.0,"code":"JobStopped","subject":"gone-en5khaksjc","message":"cancelled by its owner","numbers":{},"cause":"OwnerAsked","job":{"state":"cancelled","generation":1,"gpus":0,"lent_gpus":0,"plan":""}}');
INSERT INTO "events" VALUES(19,1,1760000001.0,'i0','{"at_s":1760000001.0,"code":"NodeLent","subject":"i0","message":"i0 is offered to training: inference uses 0.00 of 4 GPUs and needs at most 0.00 within 600 s: it can lend 2 nodes","numbers":{"capacity_gpus":4.0,"observed_gpus":0.0,"needed_gpus":0.0,"lendable_nodes":2.0},"cause":"InferenceIdle","job":null}');
INSERT INTO "events" VALUES(20,1,1760000001.0,'i1','{"at_s":1760000001.0,"code":"NodeLent","subject":"i1","message":"i1 is offered to training: inference uses 0.00 of 4 GPUs and needs at most 0.00 within 600 s: it can lend 2 nodes","numbers":{"capacity_gpus":4.0,"observed_gpus":0.0,"needed_gpus":0.0,"lendable_nodes":2.0},"cause":"InferenceIdle","job":null}');
INSERT INTO "events" VALUES(21,1,1760000001.0,'running-m4hpq2kol2','{"at_s":1760000001.0,"code":"JobStarted","subject":"running-m4hpq2kol2","message":"next in order; 2 GPUs on t0[0-1] as dp2 \u00b7 1 micro-batch","numbers":{"gpus":2.0},"cause":"FirstInOrder","job":{"state":"starting","generation":1,"gpus":2,"lent_gpus":0,"plan":"dp2 \u00b7 1 micro-batch"}}');
INSERT INTO "events" VALUES(22,2,1760000002.0,'running-m4hpq2kol2','{"at_s":1760000002.0,"code":"JobState","subject":"running-m4hpq2kol2","message":"starting -> running","numbers":{},"cause":"running","job":{"state":"running","generation":1,"gpus":2,"lent_gpus":0,"plan":"dp2 \u00b7 1 micro-batch"}}');
INSERT INTO "events" VALUES(23,2,1760000002.0,'i0','{"at_s":1760000002.0,"code":"LoanActive","subject":"i0","message":"i0 is free of inference and serves training","numbers":{},"cause":"","job":null}');
INSERT INTO "events" VALUES(24,2,1760000002.0,'i1','{"at_s":1760000002.0,"code":"LoanActive","subject":"i1","message":"i1 is free of inference and serves training","numbers":{},"cause":"","job":null}');
INSERT INTO "events" VALUES(25,2,1760000002.0,'train-nbcsayeioq','{"at_s":1760000002.0,"code":"JobStarted","subject":"train-nbcsayeioq","message":"next in order; 4 GPUs on i0[0-1] t1[0-1] as dp4 \u00b7 1 micro-batch","numbers":{"gpus":4.0},"cause":"FirstInOrder","job":{"state":"starting","generation":1,"gpus":4,"lent_gpus":2,"plan":"dp4 \u00b7 1 micro-batch"}}');
INSERT INTO "events" VALUES(26,3,1760000003.0,'train-nbcsayeioq','{"at_s":1760000003.0,"code":"JobState","subject":"train-nbcsayeioq","message":"starting -> running","numbers":{},"cause":"running","job":{"state":"running","generation":1,"gpus":4,"lent_gpus":2,"plan":"dp4 \u00b7 1 micro-batch"}}');
INSERT INTO "events" VALUES(27,4,1760000004.0,'waiting-mdx5yxgbqr','{"at_s":1760000004.0,"code":"JobState","subject":"waiting-mdx5yxgbqr","message":"submitted: waiting, 64 to 64 GPUs","numbers":{},"cause":"","job":{"state":"submitted","generation":0,"gpus":0,"lent_gpus":0,"plan":""}}');
INSERT INTO "events" VALUES(28,4,1760000004.0,'waiting-mdx5yxgbqr','{"at_s":1760000004.0,"code":"JobState","subject":"waiting-mdx5yxgbqr","message":"submitted -> queued","numbers":{},"cause":"queued","job":{"state":"queued","generation":0,"gpus":0,"lent_gpus":0,"plan":""}}');
INSERT INTO "events" VALUES(29,5,1760000005.0,'spare','{"at_s":1760000005.0,"code":"NodeChanged","subject":"spare","message":"spare joined pool training: 1 GPUs","numbers":{},"cause":"","job":null}');
INSERT INTO "events" VALUES(30,5,1760000005.0,'spare','{"at_s":1760000005.0,"code":"NodeChanged","subject":"spare","message":"spare is cordoned","numbers":{},"cause":"","job":null}');
INSERT INTO "events" VALUES(31,6,1760000006.0,'a0','{"at_s":1760000006.0,"code":"NodeChanged","subject":"a0","message":"a0 joined pool training: 8 GPUs","numbers":{},"cause":"","job":null}');
INSERT INTO "events" VALUES(32,6,1760000006.0,'planned-fa2zewygty','{"at_s":1760000006.0,"code":"JobState","subject":"planned-fa2zewygty","message":"submitted: planned, 2 to 8 GPUs","numbers":{},"cause":"","job":{"state":"submitted","generation":0,"gpus":0,"lent_gpus":0,"plan":""}}');
INSERT INTO "events" VALUES(33,6,1760000006.0,'planned-fa2zewygty','{"at_s":1760000006.0,"code":"JobState","subject":"planned-fa2zewygty","message":"submitted -> planning","numbers":{},"cause":"planning","job":{"state":"planning","generation":0,"gpus":0,"lent_gpus":0,"plan":""}}');
INSERT INTO "events" VALUES(34,7,1760000007.0,'planned-fa2zewygty','{"at_s":1760000007.0,"code":"JobState","subject":"planned-fa2zewygty","message":"planning -> queued","numbers":{},"cause":"queued","job":{"state":"queued","generation":0,"gpus":0,"lent_gpus":0,"plan":""}}');
INSERT INTO "events" VALUES(35,7,1760000007.0,'planned-fa2zewygty','{"at_s":1760000007.0,"code":"JobStarted","subject":"planned-fa2zewygty","message":"next in order; 8 GPUs on a0[0-7] as dp8 fsdp \u00b7 1 micro-batch","numbers":{"gpus":8.0},"cause":"FirstInOrder","job":{"state":"starting","generation":1,"gpus":8,"lent_gpus":0,"plan":"dp8 fsdp \u00b7 1 micro-batch"}}');
INSERT INTO "events" VALUES(36,8,1760000008.0,'planned-fa2zewygty','{"at_s":1760000008.0,"code":"JobState","subject":"planned-fa2zewygty","message":"starting -> running","numbers":{},"cause":"running","job":{"state":"running","generation":1,"gpus":8,"lent_gpus":0,"plan":"dp8 fsdp \u00b7 1 micro-batch"}}');
CREATE TABLE forecasts (
	"key" VARCHAR NOT NULL, 
	generation BIGINT NOT NULL, 
	body JSON, 
	CONSTRAINT pk_forecasts PRIMARY KEY ("key")
);
INSERT INTO "forecasts" VALUES('inference',1,'{"made_at_s":1760000000.0,"horizon_s":600.0,"quantiles":[0.5,0.999],"gpus":[0.0,0.0],"method":"test","lasting_gpus":[]}');
CREATE TABLE inbox (
	number INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	consumed_at_generation BIGINT, 
	body JSON NOT NULL, consumed_at_s DOUBLE, 
	CONSTRAINT pk_inbox PRIMARY KEY (number)
);
INSERT INTO "inbox" VALUES(1,'api-951ff1b5bf4f2ab2c45556fb',1,'{"id":"api-951ff1b5bf4f2ab2c45556fb","at_s":1760000000.0,"body":{"kind":"CreatePool","pool":{"name":"training","kind":"training","lending":{"enabled":true,"quantile":0.999,"headroom":0.02,"return_deadline_s":300.0,"cold_start_s":300.0,"kept_nodes_min":0,"lent_nodes_max":null,"loan_s_min":0.0,"blackouts":[],"demand_stale_s":null}}},"actor":"root","basis":"","is_counted":true}',1760000001.0);
INSERT INTO "inbox" VALUES(2,'api-9ea6b644d4ec483ddad16c84',1,'{"id":"api-9ea6b644d4ec483ddad16c84","at_s":1760000000.0,"body":{"kind":"CreatePool","pool":{"name":"empty","kind":"training","lending":{"enabled":true,"quantile":0.999,"headroom":0.02,"return_deadline_s":300.0,"cold_start_s":300.0,"kept_nodes_min":0,"lent_nodes_max":null,"loan_s_min":0.0,"blackouts":[],"demand_stale_s":null}}},"actor":"root","basis":"","is_counted":true}',1760000001.0);
INSERT INTO "inbox" VALUES(3,'api-dde48f631656d9b7a452b3bb',1,'{"id":"api-dde48f631656d9b7a452b3bb","at_s":1760000000.0,"body":{"kind":"CreatePool","pool":{"name":"inference","kind":"inference","lending":{"enabled":true,"quantile":0.999,"headroom":0.0,"return_deadline_s":300.0,"cold_start_s":300.0,"kept_nodes_min":0,"lent_nodes_max":null,"loan_s_min":0.0,"blackouts":[],"demand_stale_s":null}}},"actor":"root","basis":"","is_counted":true}',1760000001.0);
INSERT INTO "inbox" VALUES(4,'api-b1cca6f0933e0003d193bd49',1,'{"id":"api-b1cca6f0933e0003d193bd49","at_s":1760000000.0,"body":{"kind":"AddNode","node":{"name":"t0","pool":"training","gpu":"cpu","gpus":2,"gpu_memory_bytes":2000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}},"actor":"root","basis":"","is_counted":true}',1760000001.0);
INSERT INTO "inbox" VALUES(5,'api-b38d50676fb125136da39fb0',1,'{"id":"api-b38d50676fb125136da39fb0","at_s":1760000000.0,"body":{"kind":"AddNode","node":{"name":"t1","pool":"training","gpu":"cpu","gpus":2,"gpu_memory_bytes":2000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}},"actor":"root","basis":"","is_counted":true}',1760000001.0);
INSERT INTO "inbox" VALUES(6,'api-b0acd57da0435037010437fe',1,'{"id":"api-b0acd57da0435037010437fe","at_s":1760000000.0,"body":{"kind":"AddNode","node":{"name":"i0","pool":"inference","gpu":"cpu","gpus":2,"gpu_memory_bytes":2000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}},"actor":"root","basis":"","is_counted":true}',1760000001.0);
INSERT INTO "inbox" VALUES(7,'api-da76dffb6d7d919822725394',1,'{"id":"api-da76dffb6d7d919822725394","at_s":1760000000.0,"body":{"kind":"AddNode","node":{"name":"i1","pool":"inference","gpu":"cpu","gpus":2,"gpu_memory_bytes":2000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}},"actor":"root","basis":"","is_counted":true}',1760000001.0);
INSERT INTO "inbox" VALUES(8,'api-210c6753289e4ffdbc3696d2',1,'{"id":"api-210c6753289e4ffdbc3696d2","at_s":1760000000.0,"body":{"kind":"CreateQueue","queue":{"name":"blue","guaranteed_gpus":1,"limit_gpus":null,"weight":1.0,"user_limit_gpus":null,"user_jobs_max":null}},"actor":"root","basis":"","is_counted":true}',1760000001.0);
INSERT INTO "inbox" VALUES(9,'api-6a7ba0e0333116137bedb04e',1,'{"id":"api-6a7ba0e0333116137bedb04e","at_s":1760000000.0,"body":{"kind":"SubmitJob","job_id":"running-m4hpq2kol2","spec":{"name":"running","min_gpus":2,"max_gpus":2,"queue":"blue","priority":0,"gpu":"","model":"","profile_json":"","global_batch":0,"sequence_length":0,"steps":1000,"duration_estimate_s":null,"deadline_s":null,"run_time_s_max":null,"retries":3,"command":[],"image":"","env":{},"checkpoint":{"dir":"","interval_s":900.0,"keep":2,"volume":null},"fungible":true,"namespace":"","template_json":"","resource_uid":""}},"actor":"root","basis":"","is_counted":true}',1760000001.0);
INSERT INTO "inbox" VALUES(10,'api-0075fb72f2d80bbd8dedc16c',1,'{"id":"api-0075fb72f2d80bbd8dedc16c","at_s":1760000000.0,"body":{"kind":"SubmitJob","job_id":"asleep-n62jlmriio","spec":{"name":"asleep","min_gpus":1,"max_gpus":2,"queue":"default","priority":0,"gpu":"","model":"","profile_json":"","global_batch":0,"sequence_length":0,"steps":1000,"duration_estimate_s":null,"deadline_s":null,"run_time_s_max":null,"retries":3,"command":[],"image":"","env":{},"checkpoint":{"dir":"","interval_s":900.0,"keep":2,"volume":null},"fungible":true,"namespace":"","template_json":"","resource_uid":""}},"actor":"root","basis":"","is_counted":true}',1760000001.0);
INSERT INTO "inbox" VALUES(11,'api-2c79c631127887ef6fee984f',1,'{"id":"api-2c79c631127887ef6fee984f","at_s":1760000000.0,"body":{"kind":"SubmitJob","job_id":"gone-en5khaksjc","spec":{"name":"gone","min_gpus":1,"max_gpus":2,"queue":"default","priority":0,"gpu":"","model":"","profile_json":"","global_batch":0,"sequence_length":0,"steps":1000,"duration_estimate_s":null,"deadline_s":null,"run_time_s_max":null,"retries":3,"command":[],"image":"","env":{},"checkpoint":{"dir":"","interval_s":900.0,"keep":2,"volume":null},"fungible":true,"namespace":"","template_json":"","resource_uid":""}},"actor":"root","basis":"","is_counted":true}',1760000001.0);
INSERT INTO "inbox" VALUES(12,'api-684987dfb013f6eabcf037b4',1,'{"id":"api-684987dfb013f6eabcf037b4","at_s":1760000000.0,"body":{"kind":"SuspendJob","job_id":"asleep-n62jlmriio"},"actor":"root","basis":"","is_counted":true}',1760000001.0);
INSERT INTO "inbox" VALUES(13,'api-399e2114f8691fbf87e44d85',1,'{"id":"api-399e2114f8691fbf87e44d85","at_s":1760000000.0,"body":{"kind":"CancelJob","job_id":"gone-en5khaksjc"},"actor":"root","basis":"","is_counted":true}',1760000001.0);
INSERT INTO "inbox" VALUES(14,'api-44303da7e105fd2da64abdda',1,'{"id":"api-44303da7e105fd2da64abdda","at_s":1760000000.0,"body":{"kind":"SubmitJob","job_id":"train-nbcsayeioq","spec":{"name":"train","min_gpus":4,"max_gpus":4,"queue":"default","priority":0,"gpu":"","model":"","profile_json":"","global_batch":0,"sequence_length":0,"steps":1000,"duration_estimate_s":null,"deadline_s":null,"run_time_s_max":null,"retries":3,"command":[],"image":"","env":{},"checkpoint":{"dir":"","interval_s":900.0,"keep":2,"volume":null},"fungible":true,"namespace":"","template_json":"","resource_uid":""}},"actor":"root","basis":"","is_counted":true}',1760000001.0);
INSERT INTO "inbox" VALUES(15,'api-c35abcc17163c3a8077d6c81',1,'{"id":"api-c35abcc17163c3a8077d6c81","at_s":1760000000.0,"body":{"kind":"ReportDemand","pool":"inference","gpus":0.0},"actor":"root","basis":"","is_counted":true}',1760000001.0);
INSERT INTO "inbox" VALUES(16,'api-74f8d9f9358046722e4bfff8',4,'{"id":"api-74f8d9f9358046722e4bfff8","at_s":1760000003.0,"body":{"kind":"SubmitJob","job_id":"waiting-mdx5yxgbqr","spec":{"name":"waiting","min_gpus":64,"max_gpus":64,"queue":"default","priority":0,"gpu":"","model":"","profile_json":"","global_batch":0,"sequence_length":0,"steps":1000,"duration_estimate_s":null,"deadline_s":null,"run_time_s_max":null,"retries":3,"command":[],"image":"","env":{},"checkpoint":{"dir":"","interval_s":900.0,"keep":2,"volume":null},"fungible":true,"namespace":"","template_json":"","resource_uid":""}},"actor":"root","basis":"","is_counted":true}',1760000004.0);
INSERT INTO "inbox" VALUES(17,'api-1d1197bbda6ac9c06365dd18',5,'{"id":"api-1d1197bbda6ac9c06365dd18","at_s":1760000004.0,"body":{"kind":"AddNode","node":{"name":"spare","pool":"training","gpu":"cpu","gpus":1,"gpu_memory_bytes":2000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}},"actor":"root","basis":"","is_counted":true}',1760000005.0);
INSERT INTO "inbox" VALUES(18,'api-f897e380264afd0bfb49c746',5,'{"id":"api-f897e380264afd0bfb49c746","at_s":1760000004.0,"body":{"kind":"CordonNode","name":"spare","drain":false},"actor":"root","basis":"","is_counted":true}',1760000005.0);
INSERT INTO "inbox" VALUES(19,'api-c4b023e3bf464bc4db0b75de',6,'{"id":"api-c4b023e3bf464bc4db0b75de","at_s":1760000005.0,"body":{"kind":"AddNode","node":{"name":"a0","pool":"training","gpu":"a100-80g","gpus":8,"gpu_memory_bytes":80000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}},"actor":"anybody","basis":"","is_counted":true}',1760000006.0);
INSERT INTO "inbox" VALUES(20,'api-c93bb9be8ec4b2ebec9bc3a9',6,'{"id":"api-c93bb9be8ec4b2ebec9bc3a9","at_s":1760000005.0,"body":{"kind":"SubmitJob","job_id":"planned-fa2zewygty","spec":{"name":"planned","min_gpus":2,"max_gpus":8,"queue":"default","priority":0,"gpu":"","model":"gpt2","profile_json":"","global_batch":64,"sequence_length":0,"steps":1000,"duration_estimate_s":null,"deadline_s":null,"run_time_s_max":null,"retries":3,"command":[],"image":"","env":{},"checkpoint":{"dir":"","interval_s":900.0,"keep":2,"volume":null},"fungible":true,"namespace":"","template_json":"","resource_uid":""}},"actor":"anybody","basis":"","is_counted":true}',1760000006.0);
INSERT INTO "inbox" VALUES(21,'progress-running-m4hpq2kol2-1-40-None-None',9,'{"id":"progress-running-m4hpq2kol2-1-40-None-None","at_s":1760000008.0,"body":{"kind":"ReportProgress","job_id":"running-m4hpq2kol2","generation":1,"steps":40.0,"loss":2.5,"checkpoint_steps":null,"samples_per_s":12.0,"peak_bytes":null,"frozen_layers":null},"actor":"worker of running-m4hpq2kol2","basis":"","is_counted":true}',1760000009.0);
CREATE TABLE job_samples (
	job_id VARCHAR NOT NULL, 
	place INTEGER NOT NULL, 
	at_s DOUBLE NOT NULL, 
	steps DOUBLE NOT NULL, 
	loss DOUBLE, 
	samples_per_s DOUBLE, 
	peak_bytes BIGINT, 
	CONSTRAINT pk_job_samples PRIMARY KEY (job_id, place)
);
INSERT INTO "job_samples" VALUES('running-m4hpq2kol2',0,1760000008.0,40.0,2.5,12.0,NULL);
CREATE TABLE jobs (
	"key" VARCHAR NOT NULL, 
	generation BIGINT NOT NULL, 
	body JSON, 
	CONSTRAINT pk_jobs PRIMARY KEY ("key")
);
INSERT INTO "jobs" VALUES('running-m4hpq2kol2',9,'{"id":"running-m4hpq2kol2","spec":{"name":"running","min_gpus":2,"max_gpus":2,"queue":"blue","priority":0,"gpu":"","model":"","profile_json":"","global_batch":0,"sequence_length":0,"steps":1000,"duration_estimate_s":null,"deadline_s":null,"run_time_s_max":null,"retries":3,"command":[],"image":"","env":{},"checkpoint":{"dir":"","interval_s":900.0,"keep":2,"volume":null},"fungible":true,"namespace":"","template_json":"","resource_uid":""},"state":"running","submitted_at_s":1760000000.0,"state_since_s":1760000002.0,"progress":{"at_s":1760000002.0,"steps":0.0,"checkpoint_steps":0.0,"checkpoint_at_s":1760000001.0,"correction":1.0,"loss":2.5,"corrections":[],"samples_per_s":12.0,"peak_bytes":null},"account":{"waited_s":1.0,"gpu_s":2.0,"lost_gpu_s":0.0,"failures":0,"preemptions":0,"resizes":0,"first_started_at_s":1760000001.0,"settled_at_s":1760000002.0},"allocation":{"generation":1,"target":{"t0":[0,1]},"releasing":{},"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":1,"micro_batch_size":1,"iteration_time_s":0.5,"samples_per_s":2.0,"peak_bytes_per_gpu":0,"stages":[{"first_layer":0,"last_layer":0,"gpu":"cpu","gpus":2,"strategies":[{"layers":1,"tp":1,"sequence_sharding":false,"dp":2,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0},"leave_by_s":1760000001.0,"asked_at_generation":1,"seats":[]},"intent":"run","message":"","memory":{"percent":100,"deaths":[],"retry_at_s":null},"freezing":{"layers":0,"curve_layers":0,"at_s":0.0,"correction":null},"replan":{"generation":0,"left_s":{}},"owner":"root","save_wish":null,"sampled":{"first_at_s":1760000008.0,"last_at_s":1760000008.0}}');
INSERT INTO "jobs" VALUES('asleep-n62jlmriio',1,'{"id":"asleep-n62jlmriio","spec":{"name":"asleep","min_gpus":1,"max_gpus":2,"queue":"default","priority":0,"gpu":"","model":"","profile_json":"","global_batch":0,"sequence_length":0,"steps":1000,"duration_estimate_s":null,"deadline_s":null,"run_time_s_max":null,"retries":3,"command":[],"image":"","env":{},"checkpoint":{"dir":"","interval_s":900.0,"keep":2,"volume":null},"fungible":true,"namespace":"","template_json":"","resource_uid":""},"state":"suspended","submitted_at_s":1760000000.0,"state_since_s":1760000001.0,"progress":{"at_s":1760000001.0,"steps":0.0,"checkpoint_steps":0.0,"checkpoint_at_s":1760000001.0,"correction":1.0,"loss":null,"corrections":[],"samples_per_s":null,"peak_bytes":null},"account":{"waited_s":1.0,"gpu_s":0.0,"lost_gpu_s":0.0,"failures":0,"preemptions":0,"resizes":0,"first_started_at_s":null,"settled_at_s":1760000001.0},"allocation":{"generation":1,"target":{},"releasing":{},"plan":null,"leave_by_s":1760000061.0,"asked_at_generation":1,"seats":[]},"intent":"suspend","message":"","memory":{"percent":100,"deaths":[],"retry_at_s":null},"freezing":{"layers":0,"curve_layers":0,"at_s":0.0,"correction":null},"replan":{"generation":0,"left_s":{}},"owner":"root","save_wish":null,"sampled":null}');
INSERT INTO "jobs" VALUES('train-nbcsayeioq',3,'{"id":"train-nbcsayeioq","spec":{"name":"train","min_gpus":4,"max_gpus":4,"queue":"default","priority":0,"gpu":"","model":"","profile_json":"","global_batch":0,"sequence_length":0,"steps":1000,"duration_estimate_s":null,"deadline_s":null,"run_time_s_max":null,"retries":3,"command":[],"image":"","env":{},"checkpoint":{"dir":"","interval_s":900.0,"keep":2,"volume":null},"fungible":true,"namespace":"","template_json":"","resource_uid":""},"state":"running","submitted_at_s":1760000000.0,"state_since_s":1760000003.0,"progress":{"at_s":1760000003.0,"steps":0.0,"checkpoint_steps":0.0,"checkpoint_at_s":1760000001.0,"correction":1.0,"loss":null,"corrections":[],"samples_per_s":null,"peak_bytes":null},"account":{"waited_s":2.0,"gpu_s":4.0,"lost_gpu_s":0.0,"failures":0,"preemptions":0,"resizes":0,"first_started_at_s":1760000002.0,"settled_at_s":1760000003.0},"allocation":{"generation":1,"target":{"t1":[0,1],"i0":[0,1]},"releasing":{},"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":1,"micro_batch_size":1,"iteration_time_s":0.25,"samples_per_s":4.0,"peak_bytes_per_gpu":0,"stages":[{"first_layer":0,"last_layer":0,"gpu":"cpu","gpus":4,"strategies":[{"layers":1,"tp":1,"sequence_sharding":false,"dp":4,"zero":0,"shard_group":1,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0},"leave_by_s":1760000002.0,"asked_at_generation":2,"seats":[]},"intent":"run","message":"","memory":{"percent":100,"deaths":[],"retry_at_s":null},"freezing":{"layers":0,"curve_layers":0,"at_s":0.0,"correction":null},"replan":{"generation":0,"left_s":{}},"owner":"root","save_wish":null,"sampled":null}');
INSERT INTO "jobs" VALUES('waiting-mdx5yxgbqr',4,'{"id":"waiting-mdx5yxgbqr","spec":{"name":"waiting","min_gpus":64,"max_gpus":64,"queue":"default","priority":0,"gpu":"","model":"","profile_json":"","global_batch":0,"sequence_length":0,"steps":1000,"duration_estimate_s":null,"deadline_s":null,"run_time_s_max":null,"retries":3,"command":[],"image":"","env":{},"checkpoint":{"dir":"","interval_s":900.0,"keep":2,"volume":null},"fungible":true,"namespace":"","template_json":"","resource_uid":""},"state":"queued","submitted_at_s":1760000003.0,"state_since_s":1760000004.0,"progress":{"at_s":1760000004.0,"steps":0.0,"checkpoint_steps":0.0,"checkpoint_at_s":1760000004.0,"correction":1.0,"loss":null,"corrections":[],"samples_per_s":null,"peak_bytes":null},"account":{"waited_s":1.0,"gpu_s":0.0,"lost_gpu_s":0.0,"failures":0,"preemptions":0,"resizes":0,"first_started_at_s":null,"settled_at_s":1760000004.0},"allocation":{"generation":0,"target":{},"releasing":{},"plan":null,"leave_by_s":null,"asked_at_generation":0,"seats":[]},"intent":"run","message":"","memory":{"percent":100,"deaths":[],"retry_at_s":null},"freezing":{"layers":0,"curve_layers":0,"at_s":0.0,"correction":null},"replan":{"generation":0,"left_s":{}},"owner":"root","save_wish":null,"sampled":null}');
INSERT INTO "jobs" VALUES('planned-fa2zewygty',8,'{"id":"planned-fa2zewygty","spec":{"name":"planned","min_gpus":2,"max_gpus":8,"queue":"default","priority":0,"gpu":"","model":"gpt2","profile_json":"","global_batch":64,"sequence_length":0,"steps":1000,"duration_estimate_s":null,"deadline_s":null,"run_time_s_max":null,"retries":3,"command":[],"image":"","env":{},"checkpoint":{"dir":"","interval_s":900.0,"keep":2,"volume":null},"fungible":true,"namespace":"","template_json":"","resource_uid":""},"state":"running","submitted_at_s":1760000005.0,"state_since_s":1760000008.0,"progress":{"at_s":1760000008.0,"steps":0.0,"checkpoint_steps":0.0,"checkpoint_at_s":1760000006.0,"correction":1.0,"loss":null,"corrections":[],"samples_per_s":null,"peak_bytes":null},"account":{"waited_s":2.0,"gpu_s":8.0,"lost_gpu_s":0.0,"failures":0,"preemptions":0,"resizes":0,"first_started_at_s":1760000007.0,"settled_at_s":1760000008.0},"allocation":{"generation":1,"target":{"a0":[0,1,2,3,4,5,6,7]},"releasing":{},"plan":{"schedule":{"name":"1f1b","interleave":1},"micro_batches":1,"micro_batch_size":64,"iteration_time_s":0.06318779625515257,"samples_per_s":1012.8538071112299,"peak_bytes_per_gpu":10401075784,"stages":[{"first_layer":0,"last_layer":11,"gpu":"a100-80g","gpus":8,"strategies":[{"layers":11,"tp":1,"sequence_sharding":false,"dp":8,"zero":3,"shard_group":8,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false},{"layers":1,"tp":2,"sequence_sharding":true,"dp":4,"zero":3,"shard_group":4,"ulysses":1,"ring":1,"ep":1,"recompute":"none","offload":false}]}],"optimality_gap":0.0},"leave_by_s":1760000007.0,"asked_at_generation":7,"seats":[]},"intent":"run","message":"","memory":{"percent":100,"deaths":[],"retry_at_s":null},"freezing":{"layers":0,"curve_layers":0,"at_s":0.0,"correction":null},"replan":{"generation":0,"left_s":{}},"owner":"anybody","save_wish":null,"sampled":null}');
CREATE TABLE lease (
	id INTEGER NOT NULL, 
	holder VARCHAR NOT NULL, 
	epoch BIGINT NOT NULL, 
	expires_at_s DOUBLE NOT NULL, 
	CONSTRAINT pk_lease PRIMARY KEY (id)
);
INSERT INTO "lease" VALUES(1,'test',1,1760000024.0);
CREATE TABLE loans (
	"key" VARCHAR NOT NULL, 
	generation BIGINT NOT NULL, 
	body JSON, 
	CONSTRAINT pk_loans PRIMARY KEY ("key")
);
INSERT INTO "loans" VALUES('i0',2,'{"id":"i0-1","node":"i0","pool":"inference","state":"active","offered_at_s":1760000001.0,"state_since_s":1760000002.0,"return_by_s":null,"lent_at_s":1760000002.0,"recalled_at_s":null}');
INSERT INTO "loans" VALUES('i1',2,'{"id":"i1-1","node":"i1","pool":"inference","state":"active","offered_at_s":1760000001.0,"state_since_s":1760000002.0,"return_by_s":null,"lent_at_s":1760000002.0,"recalled_at_s":null}');
CREATE TABLE nodes (
	"key" VARCHAR NOT NULL, 
	generation BIGINT NOT NULL, 
	body JSON, 
	CONSTRAINT pk_nodes PRIMARY KEY ("key")
);
INSERT INTO "nodes" VALUES('t0',1,'{"name":"t0","pool":"training","gpu":"cpu","gpus":2,"gpu_memory_bytes":2000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}');
INSERT INTO "nodes" VALUES('t1',1,'{"name":"t1","pool":"training","gpu":"cpu","gpus":2,"gpu_memory_bytes":2000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}');
INSERT INTO "nodes" VALUES('i0',1,'{"name":"i0","pool":"inference","gpu":"cpu","gpus":2,"gpu_memory_bytes":2000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}');
INSERT INTO "nodes" VALUES('i1',1,'{"name":"i1","pool":"inference","gpu":"cpu","gpus":2,"gpu_memory_bytes":2000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}');
INSERT INTO "nodes" VALUES('spare',5,'{"name":"spare","pool":"training","gpu":"cpu","gpus":1,"gpu_memory_bytes":2000000000,"state":"up","cordoned":true,"draining":false,"inference_gpus":0,"other_gpus":0}');
INSERT INTO "nodes" VALUES('a0',6,'{"name":"a0","pool":"training","gpu":"a100-80g","gpus":8,"gpu_memory_bytes":80000000000,"state":"up","cordoned":false,"draining":false,"inference_gpus":0,"other_gpus":0}');
CREATE TABLE pools (
	"key" VARCHAR NOT NULL, 
	generation BIGINT NOT NULL, 
	body JSON, 
	CONSTRAINT pk_pools PRIMARY KEY ("key")
);
INSERT INTO "pools" VALUES('training',1,'{"name":"training","kind":"training","lending":{"enabled":true,"quantile":0.999,"headroom":0.02,"return_deadline_s":300.0,"cold_start_s":300.0,"kept_nodes_min":0,"lent_nodes_max":null,"loan_s_min":0.0,"blackouts":[],"demand_stale_s":null}}');
INSERT INTO "pools" VALUES('empty',1,'{"name":"empty","kind":"training","lending":{"enabled":true,"quantile":0.999,"headroom":0.02,"return_deadline_s":300.0,"cold_start_s":300.0,"kept_nodes_min":0,"lent_nodes_max":null,"loan_s_min":0.0,"blackouts":[],"demand_stale_s":null}}');
INSERT INTO "pools" VALUES('inference',1,'{"name":"inference","kind":"inference","lending":{"enabled":true,"quantile":0.999,"headroom":0.0,"return_deadline_s":300.0,"cold_start_s":300.0,"kept_nodes_min":0,"lent_nodes_max":null,"loan_s_min":0.0,"blackouts":[],"demand_stale_s":null}}');
CREATE TABLE queues (
	"key" VARCHAR NOT NULL, 
	generation BIGINT NOT NULL, 
	body JSON, 
	CONSTRAINT pk_queues PRIMARY KEY ("key")
);
INSERT INTO "queues" VALUES('blue',1,'{"name":"blue","guaranteed_gpus":1,"limit_gpus":null,"weight":1.0,"user_limit_gpus":null,"user_jobs_max":null}');
CREATE TABLE readings (
	number INTEGER NOT NULL, 
	pool VARCHAR NOT NULL, 
	at_s DOUBLE NOT NULL, 
	gpus DOUBLE NOT NULL, 
	asked_gpus DOUBLE NOT NULL, 
	CONSTRAINT pk_readings PRIMARY KEY (number)
);
INSERT INTO "readings" VALUES(1,'inference',1760000000.0,0.0,0.0);
CREATE TABLE simulation_texts (
	id VARCHAR NOT NULL, 
	files BLOB NOT NULL, 
	report BLOB, 
	CONSTRAINT pk_simulation_texts PRIMARY KEY (id)
);
INSERT INTO "simulation_texts" VALUES('sim-xfy7lxpri4upsto3',X'789C4D8DC10AC32010447F65F1BC01D343097E8B20A68A6C1B5771F514F2EF8D3DF534F31E0C73AA77D9451998E928A08C3D53779D7274826134DFA9F05D531D62D9A3C6A7D6F8B0AC105488D97398F349AF63488F6D622DE51063196081937D8E067AF3C4C409E1431CFE994B886260459827AEC6E6A632B0FD8C01BF6ABD6C3A5DF7EBF505FC633AAE',NULL);
CREATE TABLE simulations (
	number INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	owner VARCHAR NOT NULL, 
	created_at_s DOUBLE NOT NULL, 
	policies JSON NOT NULL, 
	seed BIGINT NOT NULL, 
	jobs_total BIGINT NOT NULL, 
	state VARCHAR NOT NULL, 
	playing VARCHAR NOT NULL, 
	jobs_done BIGINT NOT NULL, 
	tries INTEGER NOT NULL, 
	started_at_s DOUBLE, 
	ended_at_s DOUBLE, 
	reason VARCHAR NOT NULL, 
	holder VARCHAR NOT NULL, 
	claimed_until_s DOUBLE NOT NULL, 
	CONSTRAINT pk_simulations PRIMARY KEY (number)
);
INSERT INTO "simulations" VALUES(1,'sim-xfy7lxpri4upsto3','root',1760000005.0,'["fifo","ebbtide"]',0,2,'queued','',0,0,NULL,NULL,'','',0.0);
CREATE TABLE state (
	id INTEGER NOT NULL, 
	generation BIGINT NOT NULL, 
	swept_generation BIGINT NOT NULL, 
	now_s DOUBLE NOT NULL, 
	full_pass_at_s DOUBLE NOT NULL, 
	switches JSON NOT NULL, solver VARCHAR DEFAULT '' NOT NULL, 
	CONSTRAINT pk_state PRIMARY KEY (id)
);
INSERT INTO "state" VALUES(1,9,0,1760000009.0,1760000001.0,'{"lending_paused":false,"loans_recalled":false,"resizes_frozen":false}','');
CREATE TABLE swept (
	log VARCHAR NOT NULL, 
	up_to_number BIGINT NOT NULL, 
	up_to_s DOUBLE NOT NULL, 
	rows_untold BIGINT NOT NULL, 
	CONSTRAINT pk_swept PRIMARY KEY (log)
);
CREATE TABLE usage (
	hour_s BIGINT NOT NULL, 
	queue VARCHAR NOT NULL, 
	owner VARCHAR NOT NULL, 
	gpu VARCHAR NOT NULL, 
	is_lent BOOLEAN NOT NULL, 
	gpu_s DOUBLE NOT NULL, 
	lost_gpu_s DOUBLE NOT NULL, 
	CONSTRAINT pk_usage PRIMARY KEY (hour_s, queue, owner, gpu, is_lent)
);
INSERT INTO "usage" VALUES(1759996800,'blue','root','cpu',0,2.0,0.0);
INSERT INTO "usage" VALUES(1759996800,'default','root','cpu',0,2.0,0.0);
INSERT INTO "usage" VALUES(1759996800,'default','root','cpu',1,2.0,0.0);
INSERT INTO "usage" VALUES(1759996800,'default','anybody','a100-80g',0,8.0,0.0);
CREATE TABLE webhook_deliveries (
	number INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	webhook_id VARCHAR NOT NULL, 
	event_number BIGINT NOT NULL, 
	code VARCHAR NOT NULL, 
	subject VARCHAR NOT NULL, 
	created_at_s DOUBLE NOT NULL, 
	body VARCHAR NOT NULL, 
	state VARCHAR NOT NULL, 
	attempts INTEGER NOT NULL, 
	next_at_s DOUBLE NOT NULL, 
	ended_at_s DOUBLE, 
	status INTEGER, 
	error VARCHAR NOT NULL, 
	CONSTRAINT pk_webhook_deliveries PRIMARY KEY (number)
);
INSERT INTO "webhook_deliveries" VALUES(1,'msg_wh_jyhvqzp277jnwbye_3e4a47a32572','wh_jyhvqzp277jnwbye',0,'Test','wh_jyhvqzp277jnwbye',1760000005.0,'{"id":"msg_wh_jyhvqzp277jnwbye_3e4a47a32572","event_number":null,"code":"Test","subject":"wh_jyhvqzp277jnwbye","message":"root asked whether this webhook works","at_s":1760000005.0,"numbers":{},"job":null}','pending',0,1760000005.0,NULL,NULL,'');
CREATE TABLE webhooks (
	number INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	owner VARCHAR NOT NULL, 
	url VARCHAR NOT NULL, 
	created_at_s DOUBLE NOT NULL, 
	codes JSON NOT NULL, 
	queue VARCHAR NOT NULL, 
	subject VARCHAR NOT NULL, 
	enabled BOOLEAN NOT NULL, 
	disabled_reason VARCHAR NOT NULL, 
	cursor BIGINT NOT NULL, 
	dead_in_a_row INTEGER NOT NULL, 
	secret_number INTEGER NOT NULL, 
	old_secret_until_s DOUBLE NOT NULL, 
	due_at_s DOUBLE, 
	holder VARCHAR NOT NULL, 
	claimed_until_s DOUBLE NOT NULL, 
	CONSTRAINT pk_webhooks PRIMARY KEY (number)
);
INSERT INTO "webhooks" VALUES(1,'wh_jyhvqzp277jnwbye','root','https://hooks.example.com/ebbtide',1760000005.0,'[]','','',1,'',30,0,1,0.0,1760000005.0,'',0.0);
CREATE INDEX ix_pools_generation ON pools (generation);
CREATE INDEX ix_nodes_generation ON nodes (generation);
CREATE INDEX ix_jobs_generation ON jobs (generation);
CREATE INDEX ix_loans_generation ON loans (generation);
CREATE INDEX ix_demand_generation ON demand (generation);
CREATE INDEX ix_forecasts_generation ON forecasts (generation);
CREATE INDEX ix_curve_points_generation ON curve_points (generation);
CREATE INDEX ix_ended_jobs_id ON ended_jobs (id);
CREATE INDEX ix_ended_loans_id ON ended_loans (id);
CREATE UNIQUE INDEX ix_inbox_id ON inbox (id);
CREATE INDEX ix_inbox_consumed_at_generation ON inbox (consumed_at_generation);
CREATE INDEX ix_events_subject_number ON events (subject, number);
CREATE INDEX ix_readings_pool_at_s ON readings (pool, at_s);
CREATE INDEX ix_queues_generation ON queues (generation);
CREATE UNIQUE INDEX ix_api_tokens_digest ON api_tokens (digest);
CREATE INDEX ix_audit_log_actor_number ON audit_log (actor, number);
CREATE INDEX ix_audit_log_subject_number ON audit_log (subject, number);
CREATE TRIGGER audit_log_refuses_UPDATE BEFORE UPDATE ON audit_log BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE INDEX ix_ended_jobs_list ON ended_jobs (submitted_at_s, id, state, queue, owner, name);
CREATE INDEX ix_ended_loans_list ON ended_loans (offered_at_s, id, state, pool, node);
CREATE UNIQUE INDEX ix_webhooks_id ON webhooks (id);
CREATE UNIQUE INDEX ix_webhook_deliveries_id ON webhook_deliveries (id);
CREATE INDEX ix_webhook_deliveries_webhook_id_state_number ON webhook_deliveries (webhook_id, state, number);
CREATE UNIQUE INDEX ix_simulations_id ON simulations (id);
CREATE INDEX ix_simulations_owner ON simulations (owner);
CREATE INDEX ix_simulations_state ON simulations (state);
CREATE INDEX ix_webhook_deliveries_ended_at_s ON webhook_deliveries (ended_at_s);
CREATE TRIGGER audit_log_refuses_DELETE BEFORE DELETE ON audit_log WHEN OLD.number > coalesce((SELECT up_to_number FROM swept WHERE log = 'audit'), 0) BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
COMMIT;
