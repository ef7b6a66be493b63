"""Search for a plan and look at it, from Python: needs neither ranks nor devices."""

from hpctrain import Limits, Setup, draw_plan, load_cluster, load_job, locate_cluster, predict, search_best

job = load_job("mixed", ["model.vocab_size=512", "train.dtype=fp32"])  # a ready-made job; a path works too
cluster = load_cluster(locate_cluster("v100-t4"))  # a ready cluster; a path works too

result = search_best(job, cluster, Limits(scored=200), "v100-t4")
print(draw_plan(result.best.plan))

prediction = predict(Setup.of_job(job), result.best.plan, cluster)
print(f"{prediction.step_seconds:.3g} s a step, {prediction.tokens_per_second:,.0f} tokens/s, fits: {prediction.fits}")
for part, seconds in prediction.breakdown_seconds.items():
    print(f"  {part:10} {seconds:8.3f} s")
