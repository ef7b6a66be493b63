#!/bin/sh
# What Hydra calls in the place of ssh: start a command on a host that is a network namespace.
host=$1
shift
export HPCTRAIN_HOST="$host" HPCTRAIN_FAMILY="${host%-*}"
[ -n "$STAYS_SECONDS" ] || exec ip netns exec "$NAMESPACE_PREFIX$host" sh -c "$*"
# An ssh to a host that falls silent does not end.
ip netns exec "$NAMESPACE_PREFIX$host" sh -c "$*"
code=$?
[ "$code" != 137 ] || sleep "$STAYS_SECONDS"
exit "$code"
