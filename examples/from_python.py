"""Find a plan for unlike devices, and see what it is worth, from Python: needs neither ranks nor devices.

In a notebook the last line of a cell that is a plan, such as `best`, shows it as a picture.
"""

from hpctrain import find_plan

best = find_plan("mixed", "v100-t4", scored=100)  # ready ones; paths work too
even = find_plan("mixed", "v100-t4", space="even")  # as trainers cut that know no unlike devices

print(best.draw())
print(best)
ratio = best.prediction.tokens_per_second / even.prediction.tokens_per_second
print(
    f"{best.prediction.tokens_per_second:,.0f} tokens/s, fits: {best.prediction.fits}, {ratio:.2f} times the even plan"
)
