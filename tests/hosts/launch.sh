#!/bin/sh
# What Hydra calls in the place of ssh: start a command on a host that is a network namespace.
host=$1
shift
export HPCTRAIN_HOST="$host" HPCTRAIN_FAMILY="${host%-*}"
exec ip netns exec "$NAMESPACE_PREFIX$host" sh -c "$*"
