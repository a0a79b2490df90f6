"""Checks that the short suite detects faults of the code.

A mutant is one wrong change of a line, in a temporary copy of the package and its tests.
``python tests/harness/mutants.py`` runs, for each mutant, the tests of the short suite that are
named with it. These tests must pass on the unchanged code, and fail on the mutant. If they pass on
the mutant, the suite has a gap, and needs another test.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("benchmarks", "fusedops", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """A fault, and the tests that must detect it.

    Attributes:
        fault: describes the wrong behaviour.
        path: the changed file, within the package.
        before: the original text, which occurs once in the file.
        after: the text that replaces it.
        tests: a test file, and an expression for ``-k`` that selects tests of it. Node ids would
            not do, because pytest would also run cases that the short suite leaves out.
        interpreted: whether the tests run the kernels, in Triton's interpreter.
    """

    fault: str
    path: str
    before: str
    after: str
    tests: tuple[str, str]
    interpreted: bool = True

    @property
    def expression(self) -> str:
        """The tests as an argument of ``-k``."""
        folder, file = self.tests[0].split("/")
        return f"({folder} and {file} and ({self.tests[1]}))"


MUTANTS = (
    # --- kernels ----------------------------------------------------------------------------------
    Mutant(
        "a norm's backward without the keep mask",
        "norms/kernels/backward.py",
        "                if scale is not None:\n                    dz *= scale\n",
        "",
        ("operators/test_rng.py", "test_backward_has_the_forwards_mask"),
    ),
    Mutant(
        "a dropout threshold that is off by one",
        "core/device.py",
        "bits.to(tl.int32) >= threshold",
        "bits.to(tl.int32) > threshold",
        ("operators/test_rng.py", "test_mask_is_the_oracles"),
    ),
    Mutant(
        "a pointwise tail that is one element too long",
        "activations/kernels.py",
        "_pointwise_tile(x, up, y, start, places, start + places < M,",
        "_pointwise_tile(x, up, y, start, places, start + places <= M,",
        ("operators/test_poison.py", "test_nothing_is_written_beside_the_outputs"),
    ),
    Mutant(
        "the current rows loaded again instead of the next",
        "norms/kernels/backward.py",
        "loaded = rows_of(tiles - 1 - step - tl.num_programs(1), ROWS)",
        "loaded = rows_of(tiles - 1 - step, ROWS)",
        ("operators/test_norm_tiles.py", "test_next_rows_in_registers"),
    ),
    Mutant(
        "methods that a class overrides, and calls by super, not compared",
        "compiler/walking.py",
        "itertools.pairwise(owners) if self.known.supers else ()",
        "()",
        ("compiler/test_state.py", "test_change_is_seen and super"),
    ),
    Mutant(
        "the constructor of a class read, though the function only names the class",
        "compiler/walking.py",
        "        called = alone and not attributes\n",
        "        called = True\n",
        ("compiler/test_state.py", "test_change_is_seen and forward_by_name"),
    ),
    Mutant(
        "the forward of a module not compared, which the function passes to map",
        "compiler/bytecode.py",
        "    return any(instruction.argval in _CALLERS for instruction in instructions)\n",
        "    return False\n",
        ("compiler/test_state.py", "test_change_is_seen and function_in_c"),
    ),
    Mutant(
        "strides of rows and of vectors of groups ignored",
        "compiler/addresses.py",
        '        return self.argument("stride", index, f"{name}_stride", kind)\n',
        "        return row_size\n",
        ("compiler/test_inputs.py", "test_strided_rows or test_vectors_of_groups"),
    ),
    Mutant(
        "a program's partial sums of a shared row used as the sums of the whole row",
        "core/exchange.py",
        "offsets = 2 * column * M + rows[None, :]",
        "offsets = rows[None, :] + 0 * column",
        ("operators/test_norm_tiles.py", "test_rows_that_programs_share"),
    ),
    Mutant(
        "gradients of shared rows computed from the rows after them",
        "norms/kernels/backward.py",
        "rows = rows_of(tiles - 1 - step + ahead, ROWS)",
        "rows = rows_of(tiles - 1 - step + ahead - 1, ROWS)",
        ("operators/test_norm_tiles.py", "test_rows_whose_programs_wait"),
    ),
    Mutant(
        "a generated kernel that finishes rows with the numbers of the next rows",
        "compiler/phases.py",
        'swap.insert(0, f"{name}, late_{name} = late_{name}, {name}")',
        "pass",
        ("compiler/test_tiles.py", "test_rows_whose_programs_wait"),
    ),
    Mutant(
        "the second pair of sums of a generated kernel written over the first",
        "compiler/phases.py",
        'f"{moments} + {number} * WORDS * COLUMNS * M" if number else moments',
        "moments",
        ("compiler/test_tiles.py", "test_rows_that_programs_share"),
    ),
    Mutant(
        "the last tile of a generated kernel's row processed as a full one",
        "compiler/phases.py",
        '"    N // BLOCK_N if COLUMNS == 1',
        '"    PARTS if COLUMNS == 1',
        ("compiler/test_tiles.py", "test_tiles_side_by_side"),
    ),
    Mutant(
        "a vector computed before the number of its group",
        "compiler/phases.py",
        "    if not all(map(emitter.has_columns, computed)):\n",
        "    if not tuple(computed):\n",
        ("compiler/test_tiles.py", "test_tiles_side_by_side"),
    ),
    Mutant(
        "sums over rows that include those beyond the last",
        "compiler/device.py",
        "        value = tl.where(in_rows, value, 0)\n",
        "        value = value\n",
        ("compiler/test_tiles.py", "test_tiles_side_by_side"),
    ),
    Mutant(
        "partial sums stored at a program's index in the whole grid",
        "compiler/rows_of_programs.py",
        "partial_row = program.to(tl.int64)",
        "partial_row = tl.program_id(0).to(tl.int64)",
        ("compiler/test_tiles.py", "test_partial_sums"),
    ),
    Mutant(
        "a slice's last part counted as full",
        "slices/widths.py",
        "// part_lanes, parts)",
        "// part_lanes + 1, parts)",
        ("operators/test_slice_tiles.py", "test_every_slice or several_tiles"),
    ),
    Mutant(
        "prefetched rows of slices that are one tile late",
        "slices/kernels/backward.py",
        "                tl.maximum(tiles - 1 - step - programs, 0), own, M, ROWS\n",
        "                tl.maximum(tiles - 1 - step, 0), own, M, ROWS\n",
        ("operators/test_slice_tiles.py", "several_tiles_of_rows"),
    ),
    Mutant(
        "a sum over a slice's parts without the second part",
        "slices/kernels/tiles.py",
        "for part in tl.static_range(1, PARTS):\n        terms += parts[part].to(ACC)",
        "for part in tl.static_range(2, PARTS):\n        terms += parts[part].to(ACC)",
        ("operators/test_slice_tiles.py", "several_tiles"),
    ),
    Mutant(
        "tanh in 16 bits without its series near zero",
        "core/device.py",
        "square < 0.0064, x * tl.fma(square, -0.3333333, 1.0), far",
        "square < 0.0064, x * tl.fma(square, -3.3333333, 1.0), far",
        ("operators/test_values.py", "batched and test_values and bfloat16"),
    ),
    Mutant(
        "streams read again for each mix",
        "compiler/rows.py",
        "(*small, *structuring.repeated_axes(small))",
        "small",
        ("compiler/test_small_axes.py", "test_streams_are_read_once"),
    ),
    Mutant(
        "mixes of streams refused for too many parts",
        "compiler/rows.py",
        "contextlib.suppress(NotRowwiseError)",
        "contextlib.nullcontext()",
        ("compiler/test_small_axes.py", "test_values_and_gradients and hyper"),
    ),
    Mutant(
        "one row of small matrices that is not compared",
        "compiler/programs.py",
        "structured_as(traced, _unrolled(structure, sizes))",
        "structured(traced)",
        ("compiler/test_small_axes.py", "test_one_row"),
    ),
    # --- graphs of models ---------------------------------------------------------------------
    Mutant(
        "hooks that come after the first call of a graph left out",
        "models/graph.py",
        "        with as_in_eager_mode():\n",
        "        if True:\n",
        ("models/test_graph.py", "test_hook_after_the_first_call"),
    ),
    Mutant(
        "one code object for the graphs of all models",
        "models/graph.py",
        "_call.__code__.replace()",
        "_call.__code__",
        ("models/test_graph.py", "test_each_of_many_models"),
    ),
    Mutant(
        "a checkpointed part of few rows run without its graph first",
        "models/graph.py",
        "torch.is_grad_enabled() or module.training",
        "torch.is_grad_enabled()",
        ("models/test_graph.py", "test_checkpointed_model or test_inference_of_many_rows"),
    ),
    Mutant(
        "the rows of an encoder counted instead of the tokens",
        "models/graph.py",
        "rows = next(iter(tokens), None)",
        "rows = None",
        ("models/test_graph.py", "test_tokens_of_a_generation"),
    ),
    Mutant(
        "the rows of the first argument counted",
        "models/graph.py",
        "rows = max(tensors, key=_count, default=None)",
        "rows = next(iter(tensors), None)",
        ("models/test_graph.py", "test_rows_are_those"),
    ),
    Mutant(
        "the tokens of many sequences in a graph",
        "models/graph.py",
        "rows.shape[-1] == 1",
        "rows.shape[-1] == 0",
        ("models/test_graph.py", "test_tokens_of_a_generation"),
    ),
    Mutant(
        "norms in a graph that stay operators of their own",
        "models/graph.py",
        "is_traced = torch.compiler.is_compiling() or jit_tracing()",
        "is_traced = jit_tracing()",
        ("models/test_graph.py", "test_norm_is_part_of_a_region"),
    ),
    Mutant(
        "a model that is traced for what runs without kernels",
        "models/graph.py",
        "if tensor is None or not launch.runs_kernels(tensor.device.type):",
        "if tensor is None:",
        ("models/test_graph.py", "test_device_without_kernels"),
    ),
    Mutant(
        "a forward that is hidden on the instance replaced by a graph",
        "models/graph.py",
        'or "forward" in vars(module):',
        "or False:",
        ("models/test_graph.py", "test_forward_on_the_instance"),
    ),
    Mutant(
        "regions of a report of the whole model in the place of its units'",
        "models/fuse.py",
        "reports[name] = explain(modules[name], *inputs, rest=rest, **options)",
        "reports[name] = explain(model, *args, rest=rest, **kwargs)",
        ("models/test_graph.py", "test_status_with_inputs"),
    ),
    Mutant(
        "the rule in a unit's lost in a pickle",
        "models/classes.py",
        "            return (graph.GRAPH, (rest, _stored_rule(inner)))\n",
        "            return (graph.GRAPH, (rest, None))\n",
        ("models/test_graph.py", "test_loss_and_generation"),
    ),
    Mutant(
        "compiled functions that outlive the fusion",
        "models/fuse.py",
        "        classes.unfuse(module)\n        graphs.forget(module)\n",
        "        classes.unfuse(module)\n",
        ("models/test_graph.py", "test_compile_rest"),
    ),
    Mutant(
        "an excluded module in a graph",
        "models/graph.py",
        "if can_be_unit(model) and not any(map(excluded.__contains__, model.modules())):",
        "if can_be_unit(model):",
        ("models/test_graph.py", "test_excluded_module"),
    ),
    Mutant(
        "a small call reported like one that runs a graph",
        "models/fuse.py",
        "if graphs.is_small(modules[name], inputs, options):",
        "if False:",
        ("models/test_graph.py", "test_status_names_units"),
    ),
    Mutant(
        "a small call that Inductor compiles reported as one without a graph",
        "models/graph.py",
        "return rest_of(module) == EAGER and _has_few_rows(",
        "return _has_few_rows(",
        ("models/test_graph.py", "test_status_of_a_token"),
    ),
    Mutant(
        "a graph reported that Liger-Kernel's forward does not run",
        "models/fuse.py",
        "origin.startswith(classes.LIGER):",
        "not origin:",
        ("models/test_report.py", "test_unit_with_a_forward"),
        interpreted=False,
    ),
    Mutant(
        "another forward in a graph not reported",
        "models/report.py",
        "if module.replaced or (module.forward and _is_in_graph(module)):",
        "if module.replaced:",
        ("models/test_report.py", "test_forwards_that_are_replaced"),
        interpreted=False,
    ),
    Mutant(
        "the module of a replaced forward read from its wrapper",
        "models/classes.py",
        'names = getattr(function, "__globals__", {})',
        'names = {"__name__": function.__module__}',
        ("models/test_report.py", "test_forwards_that_are_replaced"),
        interpreted=False,
    ),
    Mutant(
        "logits that became whole after fusing not reported",
        "models/fuse.py",
        "return Verdict(rule, _why_whole(module, rule))",
        "return Verdict(rule)",
        ("models/test_lora_head.py", "test_other_adapters"),
        interpreted=False,
    ),
    # --- launches ---------------------------------------------------------------------------------
    Mutant(
        "the row stride of a saved tensor ignored",
        "norms/launching.py",
        "source, source_stride, source_bits = as_rows(source, cols, dims)",
        "(source, _, source_bits), source_stride = as_rows(source, cols, dims), cols",
        ("operators/test_layouts.py", "test_matrix_layouts and (gelu or norm)"),
    ),
    Mutant(
        "the strides of saved statistics ignored",
        "norms/launching.py",
        "stats, stats_bits = vector(stats)",
        "stats_bits = stats.data_ptr() if stats is not None else 0",
        ("operators/test_hooks.py", "test_saved_tensors_in_another_layout"),
    ),
    Mutant(
        "the gradients of x and the residual swapped",
        "norms/launching.py",
        "dx, dbias, dresidual, dweight, dln_bias = outs",
        "dx, dbias, dresidual, dweight, dln_bias = outs if outs[2] is None else (*outs[2::-1], *outs[3:])",
        ("operators/test_gradients.py", "test_gradients and bias_dropout_add"),
    ),
    Mutant(
        "dense tensors of other strides read as one vector",
        "activations/launching.py",
        "all(t is None or t.stride() == strides for t in (second, third, fourth))",
        "all(t is None or is_dense(t) for t in (second, third))",
        ("operators/test_layouts.py", "test_matrix_layouts and (gelu or norm)"),
    ),
    Mutant(
        "windows beyond the limit of a grid axis not processed",
        "generation/kernels.py",
        "tile, _ = place_along_rows()",
        "tile = tl.program_id(1)",
        ("operators/test_exact_launches.py", "test_more_tiles_than_an_axis_holds"),
    ),
    Mutant(
        "the first n-gram after the padding left out",
        "generation/kernels.py",
        "windows >= _leading(",
        "windows > _leading(",
        ("operators/test_exact.py", "test_values and padding"),
    ),
    # --- keys of the call cache -------------------------------------------------------------------
    Mutant(
        "a norm's key without the residual's dtype",
        "norms/operator.py",
        "(type(residual), residual.dtype, residual.device,",
        "(type(residual), residual.device,",
        ("operators/test_call_cache.py", "test_each_tensor_in_another_dtype"),
    ),
    Mutant(
        "a key of slices that does not say whether they are a single row",
        "slices/operator.py",
        "x.device, x.dim() == 2, width",
        "x.device, width",
        ("operators/test_call_cache.py", "test_forgotten_sizes"),
        interpreted=False,
    ),
    Mutant(
        "a call cache whose keys do not contain the state of autocast",
        "core/calls/call.py",
        "mode |= _AUTOCAST * ",
        "mode |= 0 * ",
        ("operators/test_call_cache.py", "autocast"),
    ),
    Mutant(
        "scores with a lazy negation that run the kernel of scores without",
        "generation/operator.py",
        "inplace and (scores.is_neg(), _overlaps(scores))",
        "inplace and _overlaps(scores)",
        ("operators/test_exact.py", "test_scores_with_a_lazy_sign"),
    ),
    # --- the path of a call -----------------------------------------------------------------------
    Mutant(
        "a registered operator that stores no pre-norm sum",
        "core/calls/words.py",
        '"saves" if saves else "drops"',
        '"drops"',
        ("operators/test_opcheck.py", "test_a_dispatch_mode_changes_no_bit"),
    ),
    Mutant(
        "a random state that does not advance",
        "core/random/rng.py",
        "without_modes():\n            seed, offset",
        "without_modes(), torch.random.fork_rng(devices=[]):\n            seed, offset",
        ("operators/test_rng.py", "test_generator_moves_on or test_state_is_the_generators"),
    ),
    Mutant(
        "a random state recorded as numbers",
        "core/random/rng.py",
        "    if 0.0 < p < 1.0 and is_recording(*tensors):\n",
        "    if False:\n",
        ("operators/test_rng_recorded.py", "test_traced_calls"),
    ),
    Mutant(
        "constants of a registered operator without the version",
        "core/calls/words.py",
        '" ".join((__version__, ',
        '" ".join(("", ',
        ("operators/test_dispatch.py", "test_a_release_has_its_own_constants"),
    ),
    # --- gradients --------------------------------------------------------------------------------
    Mutant(
        "a gradient shared by x and a residual of another dtype",
        "norms/operator.py",
        "not dropout and dtypes[0] is dtypes[2]",
        "not dropout and dtypes[2] is not None",
        ("operators/test_gradients.py", "narrower_residual"),
    ),
    Mutant(
        "second derivatives without the low-precision copy's part",
        "norms/operator.py",
        "dy = dcast if dy is None else dy + dcast",
        "dy = dcast if dy is None else dy",
        ("operators/test_gradcheck.py", "test_create_graph"),
    ),
    Mutant(
        "a tensor's gradient that includes those of tensors that depend on it",
        "core/calls/function.py",
        "t.view_as(t) if t.requires_grad else",
        "t if t.requires_grad else",
        ("operators/test_derivatives.py", "test_double_backward_of_arguments"),
    ),
    # --- models -----------------------------------------------------------------------------------
    Mutant(
        "hooks on all modules ignored",
        "models/graph.py",
        "    is_intercepted,\n    has_global_hooks,\n",
        "    is_intercepted,\n",
        ("models/test_graph.py", "test_hook_after_the_first_call"),
    ),
    # --- the backend of torch.compile -------------------------------------------------------------
    Mutant(
        "a region that a path leaves and enters again",
        "backend/regions.py",
        "        return not self.ancestors & self.descendants & ~self.members\n",
        "        return True\n",
        ("backend/test_regions.py", "test_values_and_gradients_of_fused_models"),
    ),
    Mutant(
        "a change in place that a view of the tensor does not show",
        "backend/changes.py",
        "    return node not in users and not any(node < user for user in users)\n",
        "    return True\n",
        ("backend/test_graphs.py", "test_semantics_of_the_graph"),
    ),
    Mutant(
        "casts by autocast while a captured graph runs",
        "backend/fx.py",
        '        torch.set_autocast_enabled("hpu", True)\n',
        "",
        ("backend/test_regions.py", "test_parts_without_autocast_keep_their_precision"),
    ),
    Mutant(
        "regions traced under the caller's autocast",
        "backend/fusing.py",
        "    with without_autocast():\n",
        "    if True:\n",
        ("backend/test_regions.py", "test_regions_without_autocast_keep_their_dtype"),
    ),
    Mutant(
        "sets of nodes with gradients from before a pass",
        "backend/fusing.py",
        "            rewrite.drop_sets()\n",
        "",
        ("backend/test_regions.py", "test_regions_before_a_head"),
    ),
    Mutant(
        "casts by autocast while eager operators run a captured graph",
        "backend/eager.py",
        "with without_autocast():",
        "if True:",
        ("backend/test_eager.py", "training and mixed"),
    ),
    Mutant(
        "checkpointed parts of an eager graph that save everything",
        "backend/eager.py",
        "    return checkpoint(body.forward, *args, **options)\n",
        "    return body.forward(*args)\n",
        ("backend/test_eager.py", "training and checkpointed"),
    ),
    Mutant(
        "a cast that may return its argument",
        "core/compat/bindings.py",
        'name, named["copy"] = "to", True',
        'name = "to"',
        ("backend/test_eager.py", "test_a_cast_to_the_same_dtype"),
    ),
    Mutant(
        "linear layers without their biases",
        "backend/passes/linears.py",
        "(source, transposed.args[0], *bias)",
        "(source, transposed.args[0])",
        ("backend/test_eager.py", "training and heads"),
    ),
    Mutant(
        "a mask that changes in place, treated as a constant",
        "backend/masks.py",
        "        if self._is_changed(needed):",
        "        if False:",
        ("backend/test_attention.py", "test_constant_masks_are_replaced"),
    ),
    Mutant(
        "a tensor that a checkpointed part changes, treated as unchanged",
        "backend/graphs.py",
        "        return changed_in(body)\n",
        "        return []\n",
        ("backend/test_graphs.py", "changed_later or by_a_body"),
    ),
    Mutant(
        "dead code removed also from the bodies of higher-order operators",
        "backend/graphs.py",
        "    for node in reversed(graph.nodes):\n",
        "    graph.eliminate_dead_code(lambda node: True)\n    for node in reversed(graph.nodes):\n",
        ("backend/test_graphs.py", "test_semantics_of_the_graph"),
    ),
    Mutant(
        "a bias of attention treated as a mask",
        "backend/masks.py",
        "    return visible if bool((visible | is_hidden).all()) else None\n",
        "    return visible\n",
        ("backend/test_attention.py", "test_constant_masks_are_replaced"),
    ),
    Mutant(
        "changes of heads after they were repeated not detected",
        "backend/heads.py",
        "        return (self.result._version, self.source._version) != self.versions\n",
        "        return False\n",
        ("backend/test_attention.py", "test_repeated_heads_become_groups"),
    ),
    Mutant(
        "rotated queries saved together with the values of attention",
        "backend/passes/products.py",
        "    if len(saved) < len(parts.users):\n",
        "    if False:\n",
        ("backend/test_attention.py", "test_values_are_saved_without_the_joint_product"),
    ),
    Mutant(
        "a function identified in the key of a stored graph by its qualified name alone",
        "backend/encoding.py",
        "if _at(sys.modules.get(module), path) is function:",
        "if path:",
        ("backend/test_storing.py", "test_path_depends"),
    ),
    Mutant(
        "autocast of a device without inputs missing from the key of a stored graph",
        "backend/storing.py",
        "for kind in DEVICE_TYPES:",
        "for kind in {device.type for device in devices}:",
        ("backend/test_storing.py", "test_path_depends"),
    ),
    Mutant(
        "graphs of measured and of predicted regions in one file",
        "backend/storing.py",
        "[rest, choice, *_settings()",
        "[rest, *_settings()",
        ("backend/test_measuring.py", "test_graphs_of_measured_regions"),
    ),
    Mutant(
        "measured times without effect on the choice of regions",
        "backend/selection.py",
        "ours, inductors = self._times(match, works)",
        "ours, inductors = works.times(match.machine)",
        ("backend/test_measuring.py", "test_the_time_of_calls"),
    ),
    Mutant(
        "regions measured in a mode that does not tune",
        "backend/options.py",
        "mode in _MEASURING_MODES or",
        "mode is not None or",
        ("backend/test_measuring.py", "test_only_modes_that_tune"),
    ),
    Mutant(
        "an activation recomputed although a matrix product reads it",
        "backend/passes/recomputation.py",
        "        if _is_activation(node) and _is_read_by_elements(node):\n",
        "        if _is_activation(node):\n",
        ("backend/test_returned.py", "test_returned_activations"),
    ),
    Mutant(
        "heads repeated with a mask although cuDNN accepts groups of queries",
        "backend/attention.py",
        "    return is_of_cudnn and ",
        "    return False and ",
        ("backend/test_attention.py", "groups_of_queries_in_cudnn"),
    ),
    Mutant(
        "sizes that differ between two calls of explain treated as symbols",
        "backend/entry.py",
        'name = f"explained_{next(_calls)}"',
        'name = "explained"',
        ("backend/test_report.py", "another_shape"),
    ),
    Mutant(
        "a mask left out within a vmap, whose tensors are recorded otherwise",
        "backend/capture.py",
        "not has_dtensors(args) and not in_vmap()",
        "not has_dtensors(args)",
        ("backend/test_attention.py", "vmap_keeps_its_mask"),
    ),
    Mutant(
        "inputs saved for gradients that no one wants",
        "backend/programs.py",
        "if has_gradient and node not in needs]",
        "if False]",
        ("backend/test_regions.py", "only_what_wanted"),
    ),
    Mutant(
        "another value saved, and rounded, where inputs get no gradient",
        "compiler/planning.py",
        "counted = [i for i in differentiable if _is_counted",
        "counted = [i for i in differentiable if i not in constant and _is_counted",
        ("compiler/test_needs.py", "same_bits_without_gradients"),
    ),
    Mutant(
        "a copy for a convolution taken for a kernel of its own",
        "backend/prediction.py",
        "if node not in fused and _is_copied(node)]",
        "if False]",
        ("backend/test_prediction.py", "copies_for_convolutions"),
    ),
    Mutant(
        "a convolution taken for a copy whatever the order in memory",
        "backend/prediction.py",
        "_is_convolved(view) and not _is_contiguous(value_of(view))",
        "_is_convolved(view)",
        ("backend/test_prediction.py", "copies_for_convolutions"),
    ),
    Mutant(
        "a constant of a captured graph treated as an input",
        "backend/capture.py",
        '    _inline_constants(result, {name.replace(".", "_") for name in held_names(gm.graph)})\n',
        "",
        ("backend/test_graphs.py", "test_parameters_are_marked_as_static"),
    ),
    Mutant(
        "a split outside of the region of its items",
        "backend/regions.py",
        "return users_of(node.users) <= members.keys()",
        "return False",
        ("backend/test_eager.py", "have_one_gradient"),
    ),
    Mutant(
        "a split in a region though another node reads an item",
        "backend/regions.py",
        "return users_of(node.users) <= members.keys()",
        "return True",
        ("backend/test_eager.py", "other_readers"),
    ),
    Mutant(
        "the whole graph left because a kernel cannot be written to disk",
        "backend/programs.py",
        '    except Exception as error:  # noqa: BLE001\n        return f"{type(error).__name__}: {error}"\n\n\n@functools',
        '    except ZeroDivisionError as error:\n        return f"{type(error).__name__}: {error}"\n\n\n@functools',
        ("backend/test_work.py", "fault_of_the_machine"),
    ),
    Mutant(
        "an item of a split in a region without the split",
        "backend/regions.py",
        " or not is_tensor(base):",
        ":",
        ("backend/test_eager.py", "smaller_tensor_are_inputs"),
    ),
    Mutant(
        "the kernels of a graph compiled one after the other",
        "core/launches/launch.py",
        "_locks.setdefault(key, threading.Lock())",
        "_locks.setdefault(0, threading.Lock())",
        ("backend/test_work.py", "compiled_at_the_same_time"),
    ),
    Mutant(
        "a view of a region's input in a later region not replaced",
        "backend/selection.py",
        "        self.replaced |= copies\n",
        "",
        ("backend/test_graphs.py", "test_semantics_of_the_graph"),
    ),
    Mutant(
        "a region's result with other strides than the model's",
        "backend/passes/layouts.py",
        " and _are_strides_visible(node)",
        " and False",
        ("backend/test_results.py", "test_results_have_the_strides"),
    ),
    Mutant(
        "the result of an operator after a region with other strides than the model's",
        "backend/passes/layouts.py",
        "                restrided[node] = value\n",
        "                pass\n",
        ("backend/test_results.py", "test_results_have_the_strides"),
    ),
    Mutant(
        "a product that is only detached with a gradient of zeros",
        "backend/gradients.py",
        "        if node in needs and any(map(passes_gradient, node.users)):\n",
        "        if node in needs:\n",
        ("backend/test_products.py", "only_detached"),
    ),
    Mutant(
        "a view under no_grad that requires no gradient",
        "backend/gradients.py",
        "node.all_input_nodes if enabled else aliased_inputs(node)",
        "node.all_input_nodes if enabled else []",
        ("backend/test_results.py", "test_results_and_inputs_have_gradients"),
    ),
    Mutant(
        "a row of attention without visible keys that is NaN",
        "compiler/lowering/reductions.py",
        "divisor = graph.where(is_nothing, graph.const(1.0), total)",
        "divisor = total",
        ("backend/test_results.py", "test_fully_masked_queries"),
    ),
    Mutant(
        "a part of a permutation treated as all of it",
        "backend/passes/permutations.py",
        "    if not all(value_of(part).shape == (size,) for part in parts):\n        return []\n",
        "",
        ("backend/test_permutations.py", "test_gradients_of_permuted_rows"),
    ),
    Mutant(
        "rows that belong to no group not written",
        "backend/passes/grouped_products.py",
        "    product[end:].zero_()  # the rows after the last group\n",
        "",
        ("backend/test_grouped.py", "test_results"),
    ),
    Mutant(
        "a kernel assembled by Triton's assembler although Inductor is loaded",
        "core/compat/triton.py",
        "    _choose_assembler()\n",
        "",
        ("operators/test_compat.py", "test_a_kernel_is_assembled_as_by_inductor"),
        interpreted=False,
    ),
    Mutant(
        "a sum of saved tensors saved, too",
        "compiler/planning.py",
        " for node in read if node.attrs[0] not in also_saved])\n",
        " for node in read])\n",
        ("backend/test_saved.py", "test_sums"),
    ),
    Mutant(
        "an output that the backward saves, counted without its memory",
        "compiler/planning.py",
        "        alive = choice.held + (_returned(structure, parts, dtype) if memory else 0)\n",
        "        alive = choice.held\n",
        ("backend/test_saved.py", "test_sums"),
    ),
    Mutant(
        "a region behind a larger reduction that becomes an operator",
        "backend/prediction.py",
        "max(sizes, default=0) >= most",
        "False",
        ("backend/test_prediction.py", "larger"),
    ),
    Mutant(
        "an attention that is written out, whose mask is not scaled",
        "backend/passes/attentions.py",
        "mask=lambda creator: creator.call(target, mask(creator), number)",
        "mask=mask",
        ("backend/test_written_attention.py", "eager"),
    ),
    Mutant(
        "an attention of scores that something else reads",
        "backend/passes/attentions.py",
        "len(argument.users) != 1",
        "not argument.users",
        ("backend/test_written_attention.py", "stays"),
    ),
    Mutant(
        "an attention whose mask gets no gradient",
        "backend/passes/attentions.py",
        "rewrite.needs.isdisjoint(scores.terms)",
        "True",
        ("backend/test_written_attention.py", "stays"),
    ),
    Mutant(
        "an attention that reads a changed mask",
        "backend/passes/attentions.py",
        "if len({part[node] for node in nodes}) == 1:",
        "if nodes:",
        ("backend/test_written_attention.py", "changes"),
    ),
    Mutant(
        "an attention in which rows are hidden by -inf",
        "backend/passes/attentions.py",
        "max(_HIDDEN, torch.finfo(dtype).min)",
        '-float("inf")',
        ("backend/test_written_attention.py", "hidden"),
    ),
    Mutant(
        "an attention with other strides than the model's",
        "backend/passes/attentions.py",
        "    rewrite.restrided[node] = value_of(node)\n",
        "",
        ("backend/test_written_attention.py", "strides"),
    ),
    Mutant(
        "a joint graph that is not sorted",
        "backend/joint.py",
        "    sort_nodes(graph)\n",
        "",
        ("backend/test_memory.py", "sorted"),
    ),
    # --- losses -----------------------------------------------------------------------------------
    Mutant(
        "a gradient of another argument, written over the argument",
        "losses/rows.py",
        "        if index >= self._heads:  # the caller's\n            return False\n",
        "",
        ("losses/test_values.py", "other_arguments"),
    ),
    Mutant(
        "gradients in fp16 divided by the number of rows before the products",
        "losses/head.py",
        "    is_late = operands.dtype == torch.float16",
        "    is_late = False",
        ("losses/test_values.py", "underflow"),
    ),
    Mutant(
        "a second backward of the gradients that the first one scaled",
        "losses/registration.py",
        "    if ctx.used:\n",
        "    if False:\n",
        ("losses/test_autograd.py", "second_backward"),
    ),
    Mutant(
        "class weights that count as numbers of rows",
        "losses/cross_entropy.py",
        ' shared=("weight",),',
        "",
        ("losses/test_values.py", "weights_of_classes"),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """The result of a run of pytest.

    Attributes:
        code: pytest's exit code, negative if a signal ended it.
        failure: the first failed test, or the signal.
        output: standard output and standard error.
        seconds: the duration.
    """

    code: int
    failure: str
    output: str
    seconds: float


def run(
    paths: set[str], expression: str, *, interpreted: bool, mutant: Mutant | None = None
) -> Outcome:
    """Runs the selected tests in a temporary copy, up to the first failure.

    Args:
        paths: the test files, within the folder of the tests.
        expression: the argument of ``-k``.
        interpreted: whether Triton's interpreter runs the kernels.
        mutant: the fault to apply to the copy, or None.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(
                    source, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(source, folder)
        if mutant is not None:
            changed = Path(folder, "fusedops", mutant.path)
            changed.write_text(changed.read_text().replace(mutant.before, mutant.after))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            expression,
        ]
        command += [f"tests/{path}" for path in sorted(paths)]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        environment["TRITON_INTERPRET"] = str(int(interpreted))
        start = time.monotonic()
        process = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        seconds = time.monotonic() - start
    code, output = process.returncode, process.stdout + process.stderr
    failure = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", process.stdout, re.MULTILINE)
    if failure:
        return Outcome(code, failure[1], output, seconds)
    # An access to a wrong address ends pytest by a signal.
    return Outcome(code, f"signal {-code}" if code < 0 else "", output, seconds)


def passes(mutants: list[Mutant]) -> bool:
    """Runs the tests of all mutants on the unchanged code, and returns whether they pass."""
    for interpreted in (False, True):
        selected = [mutant for mutant in mutants if mutant.interpreted == interpreted]
        if not selected:
            continue
        expression = " or ".join(dict.fromkeys(mutant.expression for mutant in selected))
        paths = {mutant.tests[0] for mutant in selected}
        outcome = run(paths, expression, interpreted=interpreted)
        if outcome.code:
            print(outcome.output, "The tests fail without a mutant.", sep="\n")
            return False
        setting = "interpreted" if interpreted else "plain"
        print(f"passes    {outcome.seconds:3.0f} s  no mutant, {setting}", flush=True)
    return True


def survives(mutant: Mutant) -> bool:
    """Runs the tests of a mutant, and returns whether none of them fails."""
    outcome = run(
        {mutant.tests[0]}, mutant.expression, interpreted=mutant.interpreted, mutant=mutant
    )
    is_detected = outcome.code == 1 or outcome.code < 0
    if is_detected:
        verdict = "detected"
    elif outcome.code == 0:
        verdict = "SURVIVED"
    else:  # pytest found no test, or an error of usage
        verdict = "NO TESTS"
        print(outcome.output)
    print(f"{verdict:8}  {outcome.seconds:3.0f} s  {mutant.fault}: {outcome.failure}", flush=True)
    return not is_detected


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-k", metavar="WORDS", default="", help="only the mutants whose description has these words"
    )
    parser.add_argument(
        "-j", metavar="N", type=int, default=os.cpu_count(), help="mutants at a time"
    )
    arguments = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if arguments.k in mutant.fault]
    for mutant in mutants:
        count = (ROOT / "fusedops" / mutant.path).read_text().count(mutant.before)
        if count != 1:
            print(f"{mutant.fault}: {count} times in {mutant.path}, expected once")
            return 1
    if not passes(mutants):
        return 1
    with ThreadPoolExecutor(arguments.j) as pool:
        survivors = sum(pool.map(survives, mutants))
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants detected")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
