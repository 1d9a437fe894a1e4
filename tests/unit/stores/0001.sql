-- What a database of revision 0001 may hold; rows as `sqlite3 results.db .dump` writes them.
INSERT INTO "tuner_canary" VALUES(1,1,'9edc4113a489d827','081ba68859933223',1234.5,'2026-12-04 03:16:28.715287');
INSERT INTO "tuner_candidate" VALUES('081ba68859933223','gemm_cpu_0','gemm_cpu','5eed','{"tile_m": 8, "order": "mnk", "prefetch": true}');
INSERT INTO "tuner_candidate" VALUES('d417dda209224c88','gemm_cpu_1','gemm_cpu','5eed','{"tile_m": 16, "order": "mnk", "prefetch": true}');
INSERT INTO "tuner_device" VALUES('d860dcc9b8ca4040','cpu','A Processor','x86_64-v3',2,'none','Linux x86_64','zig 0.15.2 clang 20');
INSERT INTO "tuner_final" VALUES(1,1,0,2.0,X'000000000000F83F0000000000000440');
INSERT INTO "tuner_problem" VALUES('9edc4113a489d827','f32_nn_64x48x32','f32_nn',64,48,32,1,'{"type": {"trans_a": "N", "trans_b": "N", "dtype_a": "f32", "dtype_b": "f32", "dtype_c": "f32", "dtype_d": "f32", "compute": "f32", "epilogue": {"bias": null, "activation": "none", "scale_a": false, "scale_b": false, "scale_alpha_vec": false}}, "m": 64, "n": 48, "k": 32, "batch_count": 1, "lda": 64, "ldb": 32, "ldc": 64, "ldd": 64, "stride_a": 2048, "stride_b": 1536, "stride_c": 3072, "stride_d": 3072, "alpha": 1.0, "beta": 0.0}');
INSERT INTO "tuner_protocol" VALUES('b6343649e551845d',1,0.01,7,200,0.5);
INSERT INTO "tuner_run" VALUES(1,'quickstart','name: "ünïcode"
','d860dcc9b8ca4040','b6343649e551845d','model',1099511627776,'0.1.0','interrupted','2026-12-04 03:16:28.695425','2026-12-04 03:16:28.716521');
INSERT INTO "tuner_source" VALUES('3498221517fd5a26','c','kernel_0','int x = ''\'''';  /* µ */
');
INSERT INTO "tuner_trial" VALUES(1,'d860dcc9b8ca4040','9edc4113a489d827','b6343649e551845d','081ba68859933223',1,'model',NULL,1,'2026-12-04 03:16:28.699164','2026-12-04 03:16:28.703868','ok','measured',1000.5,1.00016666666666662879e+03,1000.6,X'CDCCCCCCCC448F400000000000448F40FFFFFFFFFF438F40',0,'',0.25,0.011,0.022,0.5,'abababababababababababababababababababababababababababababababab');
INSERT INTO "tuner_trial" VALUES(2,'d860dcc9b8ca4040','9edc4113a489d827','b6343649e551845d','d417dda209224c88',1,'model',12.5,1,'2026-12-04 03:16:28.706502',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "tuner_winner" VALUES(1,'d860dcc9b8ca4040','9edc4113a489d827','b6343649e551845d','081ba68859933223',1,1,'3498221517fd5a26','cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd',999.9,990.0,1010.0,NULL,'2026-01-02 03:04:05.678901','["gemm_cpu_7", "gemm_cpu_9"]');
