// How RDNA 3 multiplies f16 matrices into f32 sums, with its 16x16x16 matrix units (WMMA).
//
// IREE 3.13's own pipeline for such products (CooperativeMatrixVectorize) converts the operands to f32 first, which is
// wrong (iree-org/iree issue 24817) and which the audit then repairs, and lets the workgroups run along N first, so
// that a weight matrix larger than the L2 cache is read once per 64 tokens. This one is the same list of passes but for
//   transpose-workgroup=true        the workgroups run along M first: weights come from memory once per block;
//   fold-cast-into-contract=true    the conversion becomes part of the product: operands stay f16;
//   gpu-pipelining, schedule 0      the next tiles wait in registers: one buffer in shared memory instead of two.
// It takes operands in any order of their axes, so caches can be stored slot first. What it cannot do is an epilogue
// that needs more than sums, products and conversions of whole tiles (exp, a broadcast): such products keep IREE's
// pipeline, and if they were matched here they would not compile. The models have one: the gates of the delta rule, of
// as many rows as there are gates (32 or 64), and as many columns as a block has tokens. So a plain product of 64 rows
// must have more columns than a block has tokens.
//
// Tile sizes are those with the least static cost by preflight; docs/radeon-780m.md has the table. A tile must divide the
// product: the first sequence that matches is taken. tile_sizes are those of the workgroup, of a subgroup, along K, and
// of the unit.
//
//   iree-compile --iree-codegen-transform-dialect-library=tuning/cooperative-16.mlir@__kernel_config

#passes = #iree_codegen.pass_pipeline<"iree-convert-accgemm-to-gemm,iree-codegen-tile-and-distribute-to-workgroups-using-forall-op{transpose-workgroup=true},iree-codegen-fold-reshape-into-interface-tensor,iree-codegen-bufferize-dispatch-tensor-load-store,iree-codegen-config-tracking-canonicalize,cse,iree-eliminate-empty-tensors,empty-tensor-to-alloc-tensor,iree-codegen-iree-comprehensive-bufferize,iree-codegen-inject-assume-alignment,resolve-shaped-type-result-dims,iree-codegen-canonicalize,cse,iree-codegen-canonicalize,iree-codegen-cleanup-buffer-alloc-view,iree-spirv-tile-and-promote{promote-c=true skip-thread=true},iree-codegen-propagate-dispatch-size-bounds,iree-codegen-remove-single-iteration-loop,iree-codegen-config-tracking-canonicalize,cse,iree-spirv-tile-to-cooperative-ops,iree-codegen-propagate-dispatch-size-bounds,iree-codegen-remove-single-iteration-loop,canonicalize,cse,iree-codegen-memrefcopy-to-linalg,iree-codegen-gpu-distribute-shared-memory-copy,iree-codegen-gpu-reduce-bank-conflicts{padding-bits=128},iree-codegen-propagate-dispatch-size-bounds,iree-codegen-generic-vectorization{enable-cleanup=true fold-cast-into-contract=true generate-contract=true use-configured-vector-sizes=true vectorize-copies=true},fold-memref-alias-ops,iree-spirv-vectorize-to-cooperative-ops,cse,iree-codegen-optimize-tensor-insert-extract-slices,iree-codegen-remove-single-iteration-loop,canonicalize,cse,iree-codegen-optimize-vector-transfer{flatten=false redundant-hoisting=true},iree-codegen-canonicalize-scf-for,canonicalize,cse,iree-spirv-vector-to-gpu-subgroup-mma-ops,canonicalize,cse,iree-spirv-initial-vector-lowering,iree-codegen-optimize-tensor-insert-extract-slices,iree-spirv-final-vector-lowering,iree-codegen-gpu-pipelining{epilogue-peeling=true pipeline-depth=1 schedule-index=0}">

#plain_128x128 = #iree_codegen.compilation_info<
  lowering_config = #iree_codegen.lowering_config<tile_sizes = [[128, 128], [64, 32], [0, 0, 32], [16, 16, 16]]>,
  translation_info = #iree_codegen.translation_info<
    pipeline = #passes workgroup_size = [128, 2, 1] subgroup_size = 32,
    {pipeline_depth = 1 : i64, store_stage = 1 : i64}>>
#plain_64x128 = #iree_codegen.compilation_info<
  lowering_config = #iree_codegen.lowering_config<tile_sizes = [[64, 128], [32, 64], [0, 0, 32], [16, 16, 16]]>,
  translation_info = #iree_codegen.translation_info<
    pipeline = #passes workgroup_size = [64, 2, 1] subgroup_size = 32,
    {pipeline_depth = 1 : i64, store_stage = 1 : i64}>>
#batched_64x128 = #iree_codegen.compilation_info<
  lowering_config = #iree_codegen.lowering_config<tile_sizes = [[1, 64, 128], [1, 32, 64], [0, 0, 0, 32], [1, 16, 16, 16]]>,
  translation_info = #iree_codegen.translation_info<
    pipeline = #passes workgroup_size = [64, 2, 1] subgroup_size = 32,
    {pipeline_depth = 1 : i64, store_stage = 1 : i64}>>
#batched_64x64 = #iree_codegen.compilation_info<
  lowering_config = #iree_codegen.lowering_config<tile_sizes = [[1, 64, 64], [1, 32, 32], [0, 0, 0, 32], [1, 16, 16, 16]]>,
  translation_info = #iree_codegen.translation_info<
    pipeline = #passes workgroup_size = [64, 2, 1] subgroup_size = 32,
    {pipeline_depth = 1 : i64, store_stage = 1 : i64}>>
#batched_16x64 = #iree_codegen.compilation_info<
  lowering_config = #iree_codegen.lowering_config<tile_sizes = [[1, 16, 64], [1, 16, 32], [0, 0, 0, 32], [1, 16, 16, 16]]>,
  translation_info = #iree_codegen.translation_info<
    pipeline = #passes workgroup_size = [64, 1, 1] subgroup_size = 32,
    {pipeline_depth = 1 : i64, store_stage = 1 : i64}>>
#batched_16x32 = #iree_codegen.compilation_info<
  lowering_config = #iree_codegen.lowering_config<tile_sizes = [[1, 16, 32], [1, 16, 32], [0, 0, 0, 32], [1, 16, 16, 16]]>,
  translation_info = #iree_codegen.translation_info<
    pipeline = #passes workgroup_size = [32, 1, 1] subgroup_size = 32,
    {pipeline_depth = 1 : i64, store_stage = 1 : i64}>>

module attributes {transform.with_named_sequence} {
  transform.named_sequence @annotate(
      %op: !transform.any_op {transform.readonly}, %config: !transform.any_param {transform.readonly}) {
    transform.annotate %op "compilation_info" = %config : !transform.any_op, !transform.any_param
    transform.yield
  }

  transform.named_sequence @plain_128x128(%op: !transform.any_op {transform.readonly})
      -> (!transform.any_op, !transform.any_param) {
    %b, %m, %n, %k = transform.iree.match.contraction %op, lhs_type = f16, rhs_type = f16, output_type = f32
        : !transform.any_op -> !transform.param<i64>
    %out = transform.get_operand %op[2] : (!transform.any_op) -> !transform.any_value
    transform.iree.match.cast_compatible_type %out = tensor<?x?xf32> : !transform.any_value
    transform.iree.match.dim_is_multiple_of %out[0], 128 : !transform.any_value
    transform.iree.match.dim_is_multiple_of %out[1], 128 : !transform.any_value
    %config = transform.param.constant #plain_128x128 -> !transform.any_param
    transform.yield %op, %config : !transform.any_op, !transform.any_param
  }

  transform.named_sequence @plain_64x128(%op: !transform.any_op {transform.readonly})
      -> (!transform.any_op, !transform.any_param) {
    %b, %m, %n, %k = transform.iree.match.contraction %op, lhs_type = f16, rhs_type = f16, output_type = f32
        : !transform.any_op -> !transform.param<i64>
    %out = transform.get_operand %op[2] : (!transform.any_op) -> !transform.any_value
    transform.iree.match.cast_compatible_type %out = tensor<?x?xf32> : !transform.any_value
    transform.iree.match.dim_is_multiple_of %out[0], 64 : !transform.any_value
    transform.iree.match.dim_is_multiple_of %out[1], 128 : !transform.any_value
    transform.iree.match.dim_bounds %out[1], umin = 513, none : !transform.any_value
    %config = transform.param.constant #plain_64x128 -> !transform.any_param
    transform.yield %op, %config : !transform.any_op, !transform.any_param
  }

  transform.named_sequence @batched_64x128(%op: !transform.any_op {transform.readonly})
      -> (!transform.any_op, !transform.any_param) {
    %b, %m, %n, %k = transform.iree.match.contraction %op, lhs_type = f16, rhs_type = f16, output_type = f32
        : !transform.any_op -> !transform.param<i64>
    %out = transform.get_operand %op[2] : (!transform.any_op) -> !transform.any_value
    transform.iree.match.cast_compatible_type %out = tensor<?x?x?xf32> : !transform.any_value
    transform.iree.match.dim_is_multiple_of %out[1], 64 : !transform.any_value
    transform.iree.match.dim_is_multiple_of %out[2], 128 : !transform.any_value
    %config = transform.param.constant #batched_64x128 -> !transform.any_param
    transform.yield %op, %config : !transform.any_op, !transform.any_param
  }

  transform.named_sequence @batched_64x64(%op: !transform.any_op {transform.readonly})
      -> (!transform.any_op, !transform.any_param) {
    %b, %m, %n, %k = transform.iree.match.contraction %op, lhs_type = f16, rhs_type = f16, output_type = f32
        : !transform.any_op -> !transform.param<i64>
    %out = transform.get_operand %op[2] : (!transform.any_op) -> !transform.any_value
    transform.iree.match.cast_compatible_type %out = tensor<?x?x?xf32> : !transform.any_value
    transform.iree.match.dim_is_multiple_of %out[1], 64 : !transform.any_value
    transform.iree.match.dim_is_multiple_of %out[2], 64 : !transform.any_value
    %config = transform.param.constant #batched_64x64 -> !transform.any_param
    transform.yield %op, %config : !transform.any_op, !transform.any_param
  }

  transform.named_sequence @batched_16x64(%op: !transform.any_op {transform.readonly})
      -> (!transform.any_op, !transform.any_param) {
    %b, %m, %n, %k = transform.iree.match.contraction %op, lhs_type = f16, rhs_type = f16, output_type = f32
        : !transform.any_op -> !transform.param<i64>
    %out = transform.get_operand %op[2] : (!transform.any_op) -> !transform.any_value
    transform.iree.match.cast_compatible_type %out = tensor<?x?x?xf32> : !transform.any_value
    transform.iree.match.dim_is_multiple_of %out[1], 16 : !transform.any_value
    transform.iree.match.dim_is_multiple_of %out[2], 64 : !transform.any_value
    %config = transform.param.constant #batched_16x64 -> !transform.any_param
    transform.yield %op, %config : !transform.any_op, !transform.any_param
  }

  transform.named_sequence @batched_16x32(%op: !transform.any_op {transform.readonly})
      -> (!transform.any_op, !transform.any_param) {
    %b, %m, %n, %k = transform.iree.match.contraction %op, lhs_type = f16, rhs_type = f16, output_type = f32
        : !transform.any_op -> !transform.param<i64>
    %out = transform.get_operand %op[2] : (!transform.any_op) -> !transform.any_value
    transform.iree.match.cast_compatible_type %out = tensor<?x?x?xf32> : !transform.any_value
    transform.iree.match.dim_is_multiple_of %out[1], 16 : !transform.any_value
    transform.iree.match.dim_is_multiple_of %out[2], 32 : !transform.any_value
    %config = transform.param.constant #batched_16x32 -> !transform.any_param
    transform.yield %op, %config : !transform.any_op, !transform.any_param
  }

  transform.named_sequence @__kernel_config(%variant: !transform.any_op {transform.consumed}) {
    transform.foreach_match in %variant
        @plain_128x128 -> @annotate,
        @plain_64x128 -> @annotate,
        @batched_64x128 -> @annotate,
        @batched_64x64 -> @annotate,
        @batched_16x64 -> @annotate,
        @batched_16x32 -> @annotate
      : (!transform.any_op) -> !transform.any_op
    transform.yield
  }
}
