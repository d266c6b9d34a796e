"""The laws of every posterior, each with the tests that state it: for counting them and for faults."""

from __future__ import annotations

POSTERIORS = "tests/conformance/test_posteriors.py"
SURFACE = "tests/conformance/test_one_surface.py"
GRADIENTS = "tests/conformance/test_gradients.py"
SAVE = "tests/posteriors/test_save.py"

LAWS: dict[str, tuple[str, ...]] = {
    "marginals are blocks of the joint law": (
        f"{POSTERIORS}::test_marginals_are_the_diagonal_blocks_of_the_joint_law",
        f"{SURFACE}::test_a_batch_of_laws_is_the_laws_of_its_groups",
        f"{SURFACE}::test_the_mean_is_that_of_the_marginal_law",
    ),
    "samples have the moments of the joint law": (
        f"{POSTERIORS}::test_draws_have_the_law_of_the_posterior",
    ),
    "samples differ from call to call": (
        f"{POSTERIORS}::test_without_a_generator_every_draw_is_new",
    ),
    "samples repeat with a generator": (
        f"{POSTERIORS}::test_a_generator_makes_draws_reproducible_and_leaves_the_global_state_alone",
    ),
    "gradients in x are finite differences": (
        f"{GRADIENTS}::test_gradients_in_x_are_finite_differences",
        f"{SURFACE}::test_the_mean_has_gradients_in_x",
    ),
    "update is conditioning on all": (
        f"{POSTERIORS}::test_updating_is_conditioning_on_everything_at_once",
        f"{POSTERIORS}::test_updating_what_a_method_found_is_conditioning_on_everything_or_is_refused",
    ),
    "saved and loaded it is equal": (
        f"{SAVE}::test_a_loaded_posterior_predicts_the_same_bits",
        f"{SURFACE}::test_what_a_method_found_is_loaded_with_the_same_bits",
    ),
    "moved and moved back it is the same": (
        f"{POSTERIORS}::test_moving_to_float32_and_back_keeps_the_law_and_leaves_the_original_alone",
        f"{POSTERIORS}::test_moving_nowhere_changes_nothing",
    ),
    "float32 is near float64": (f"{POSTERIORS}::test_float32_predictions_stay_close",),
    "a second prediction solves nothing": (
        f"{POSTERIORS}::test_a_prediction_factorizes_and_solves_nothing_anew",
    ),
}
