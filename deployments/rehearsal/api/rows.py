"""One instance as the market prints it."""

from __future__ import annotations

from typing import Any

from deployments.rehearsal.catalogue import driver_number
from deployments.rehearsal.market import Contract, Market


def instance_row(market: Market, contract: Contract) -> dict[str, Any]:
    offer, now = contract.offer, market.clock()
    endpoints = None if "boot.no_address" in contract.effects else market.host.endpoints(contract)
    reachable = contract.running_at is not None and endpoints is not None
    state = contract.intended
    return {
        "id": contract.id,
        "actual_status": contract.status,
        "intended_status": state,
        "cur_state": state,
        "next_state": state,
        "status_msg": contract.status_msg,
        "label": contract.label,
        "machine_id": offer.machine_id,
        "host_id": offer.host_id,
        "bundle_id": offer.id - 23_100_901,
        "num_gpus": offer.num_gpus,
        "gpu_name": contract.gpu_name,
        "gpu_ram": contract.gpu_ram_mb,
        "gpu_totalram": contract.gpu_ram_mb * offer.num_gpus,
        "gpu_util": 0.0 if contract.status == "running" else None,
        "gpu_temp": None,
        "gpu_arch": "nvidia",
        "cpu_util": 0.0,
        "cpu_ram": offer.cpu_ram_mb,
        "cpu_cores": offer.cpu_cores,
        "cpu_cores_effective": offer.cpu_cores_effective,
        "mem_usage": None,
        "mem_limit": None,
        "vmem_usage": None,
        "ssh_host": "127.0.0.1" if endpoints else None,
        "ssh_port": endpoints.proxy_port if endpoints else None,
        "ssh_idx": "5",
        # The real rows carry this trailing space too.
        "public_ipaddr": "127.0.0.1 ",
        "direct_port_start": -1,
        "direct_port_end": -1,
        "direct_port_count": 24,
        "ports": {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(endpoints.direct_port)}]}
        if reachable and endpoints
        else None,
        "image_uuid": contract.image,
        # The misspelling is the market's own.
        "image_runtype": "ssh ssh_direc ssh_proxy",
        "image_args": [],
        "extra_env": [[name, value] for name, value in contract.env.items()],
        "onstart": contract.onstart,
        "template_hash_id": None,
        "template_name": None,
        "jupyter_token": None,
        "is_bid": contract.is_bid,
        "min_bid": offer.min_bid_usd,
        "dph_base": contract.dph_base_usd,
        "dph_total": contract.dph_total_usd,
        "storage_cost": offer.storage_cost_usd_gb_month,
        "storage_total_cost": contract.storage_usd_h,
        "inet_up": offer.inet_up_mbps,
        "inet_down": offer.inet_down_mbps,
        "inet_up_cost": offer.inet_cost_usd_gb,
        "inet_down_cost": offer.inet_cost_usd_gb,
        "start_date": contract.created_at,
        "end_date": contract.ends_at,
        "duration": contract.ends_at - now,
        "uptime_mins": None if contract.running_at is None else (now - contract.running_at) / 60,
        "time_remaining": "",
        "disk_space": contract.disk_gb,
        "disk_usage": -1,
        "disk_util": -1,
        "disk_bw": 3120.0,
        "cuda_max_good": offer.cuda_max_good,
        "compute_cap": offer.compute_cap,
        "driver_version": offer.driver_version,
        "driver_vers": driver_number(offer.driver_version),
        "reliability2": offer.reliability,
        "verification": offer.verification,
        "geolocation": offer.geolocation,
        "country_code": offer.country,
        "static_ip": True,
        "hosting_type": 0,
        "dlperf": 231.2,
        "total_flops": offer.total_tflops,
    }
