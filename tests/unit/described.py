"""A cluster as a person would type it."""

TEXT = """
[families.a100]
kind = "cuda"
origin = "datasheet"
origins = {host_copy_bytes_per_second = "assumed"}
memory_bytes = 80e9
memory_bytes_per_second = 2.0e12
host_copy_bytes_per_second = 25e9
peak_flops_per_second = {fp32 = 19.5e12, bf16 = 312e12}

[families.mi250x]
kind = "rocm"
origin = "measured"
memory_bytes = 64_000_000_000
memory_bytes_per_second = 1.6e12
sustained_flops_per_second = {bf16 = 140e12}
products = [
  {dtype = "bf16", shape = [4096, 4096, 4096], flops_per_second = 140e12},  # of one GCD
]

[fabrics.ib]
origin = "datasheet"
latency_seconds = 2e-6

[fabrics.sling]
origin = "datasheet"
latency_seconds = 2.5e-6

[fabrics.ethernet]
origin = "assumed"
latency_seconds = 30e-6
bytes_per_second = 2e9

[[nodes]]
count = 2
devices = {a100 = 8}
origin = "datasheet"
link_latency_seconds = 1e-6
link_bytes_per_second = 300e9
nics = [
  {origin = "datasheet", fabric = "ib", count = 4, send_bytes_per_second = 25e9, receive_bytes_per_second = 25e9},
  {origin = "datasheet", fabric = "ethernet", send_bytes_per_second = 3e9, receive_bytes_per_second = 3e9},
]

[[nodes]]
count = 2
devices = {mi250x = 8}
origin = "datasheet"
link_latency_seconds = 2e-6
link_bytes_per_second = 50e9
nics = [
  {origin = "datasheet", fabric = "sling", count = 4, send_bytes_per_second = 2e10, receive_bytes_per_second = 2e10},
  {origin = "datasheet", fabric = "ethernet", send_bytes_per_second = 3e9, receive_bytes_per_second = 3e9},
]

[[links]]
families = ["mi250x", "a100"]
fabric = "ethernet"
origin = "measured"
latency_seconds = 40e-6
bytes_per_second = 1e9
times = [
  {message_bytes = 1_000, flows = 1, seconds = 41e-6},
  {message_bytes = 1_000_000, flows = 1, seconds = 1040e-6},
  {message_bytes = 1_000, flows = 4, seconds = 42e-6},
  {message_bytes = 1_000_000, flows = 4, seconds = 2040e-6},
]
"""
FAMILY = TEXT[TEXT.index("[families.mi250x]") : TEXT.index("[fabrics.ib]")]
NODE = "[[nodes]]\ndevices = {mi250x = 1}\n"
