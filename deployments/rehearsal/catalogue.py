"""The pretend market's offers: a fixed list in which every filter has something to remove.

Numbers are invented but shaped like the market's own rows (MB, Mbit/s, $/GB, $/GB/month; prices of late 2026).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DRIVER_GOOD = "580.95.05"


@dataclass(frozen=True)
class Offer:
    """One ask. `note` says which filter it is there to test; the market never shows it."""

    id: int
    machine_id: int
    gpu_name: str
    gpu_ram_mb: int
    compute_cap: int
    dph_base_usd: float
    note: str
    num_gpus: int = 1
    cpu_arch: str = "amd64"
    geolocation: str | None = "Bavaria, DE"
    inet_up_mbps: float = 640.9
    inet_down_mbps: float = 812.4
    inet_cost_usd_gb: float = 0.0045
    storage_cost_usd_gb_month: float = 0.15
    disk_gb: float = 1480.0
    reliability: float = 0.9741
    verification: str = "verified"
    cuda_max_good: float = 13.0
    driver_version: str = DRIVER_GOOD
    duration_s: float = 1_814_400.0
    cpu_ram_mb: int = 515_000
    cpu_cores: int | None = 128
    cpu_cores_effective: float = 32.0
    pcie_bw_gbs: float = 52.1
    gpu_max_power_w: int = 600
    gpu_mem_bw_gbs: float = 1512.4
    total_tflops: float = 119.8

    @property
    def host_id(self) -> int:
        return self.machine_id + 36_900

    @property
    def country(self) -> str | None:
        return self.geolocation.rsplit(",", 1)[-1].strip() if self.geolocation else None

    @property
    def min_bid_usd(self) -> float:
        return round(self.dph_base_usd * 0.55, 4)

    def storage_usd_h(self, disk_gb: float) -> float:
        """$/h for this much disk: the price is per GB and month of 720 hours."""
        return self.storage_cost_usd_gb_month * disk_gb / 720

    def row(self, *, now: float, allocated_gb: float, rented: bool, bid: bool) -> dict[str, Any]:
        """The offer as the market's search prints it, priced for `allocated_gb` of disk."""
        base = self.min_bid_usd if bid else self.dph_base_usd
        disk_h = self.storage_usd_h(allocated_gb)
        total = base + disk_h
        return {
            "id": self.id,
            "ask_contract_id": self.id,
            "bundle_id": self.id - 23_100_901,
            "machine_id": self.machine_id,
            "host_id": self.host_id,
            "num_gpus": self.num_gpus,
            "gpu_name": self.gpu_name,
            "gpu_ram": self.gpu_ram_mb,
            "gpu_total_ram": self.gpu_ram_mb * self.num_gpus,
            "gpu_arch": "nvidia",
            "gpu_frac": 0.25,
            "gpu_lanes": 16,
            "gpu_mem_bw": self.gpu_mem_bw_gbs,
            "gpu_max_power": self.gpu_max_power_w,
            "compute_cap": self.compute_cap,
            "cuda_max_good": self.cuda_max_good,
            "driver_version": self.driver_version,
            "driver_vers": driver_number(self.driver_version),
            "total_flops": self.total_tflops,
            "dlperf": round(self.total_tflops * 1.93, 1),
            "dlperf_per_dphtotal": round(self.total_tflops * 1.93 / total, 1),
            "flops_per_dphtotal": round(self.total_tflops / total, 1),
            "pcie_bw": self.pcie_bw_gbs,
            "pci_gen": 5 if self.pcie_bw_gbs > 30 else 4,
            "bw_nvlink": 0,
            "cpu_arch": self.cpu_arch,
            "cpu_name": "EPYC 9554",
            "cpu_cores": self.cpu_cores,
            "cpu_cores_effective": self.cpu_cores_effective,
            "cpu_ram": self.cpu_ram_mb,
            "disk_space": self.disk_gb,
            "disk_bw": 3120.0,
            "storage_cost": self.storage_cost_usd_gb_month,
            "storage_total_cost": disk_h,
            "dph_base": base,
            "dph_total": total,
            "discounted_dph_total": total,
            "min_bid": self.min_bid_usd,
            "is_bid": bid,
            "inet_up": self.inet_up_mbps,
            "inet_down": self.inet_down_mbps,
            "inet_up_cost": self.inet_cost_usd_gb,
            "inet_down_cost": self.inet_cost_usd_gb,
            "internet_up_cost_per_tb": self.inet_cost_usd_gb * 1000,
            "internet_down_cost_per_tb": self.inet_cost_usd_gb * 1000,
            "reliability": self.reliability,
            "reliability2": self.reliability,
            "expected_reliability": round(self.reliability - 0.01, 4),
            "verification": self.verification,
            "vericode": 1 if self.verification == "verified" else 0,
            "hosting_type": 0,
            "external": None,
            "resource_type": "gpu",
            "vms_enabled": False,
            "geolocation": self.geolocation,
            "geolocode": None,
            "country_code": self.country,
            "static_ip": True,
            "direct_port_count": 24,
            "public_ipaddr": "127.0.0.1",
            "rentable": not rented,
            "rented": rented,
            "duration": self.duration_s,
            "start_date": now,
            "end_date": now + self.duration_s,
            "os_version": "22.04",
            "score": round(self.total_tflops * self.reliability / total, 1),
            "search": {
                "gpuCostPerHour": base,
                "diskHour": disk_h,
                "totalHour": total,
                "discountTotalHour": 0,
                "discountedTotalPerHour": total,
            },
        }


def driver_number(version: str) -> int:
    """ "580.95.05" as the market's filterable integer AAABBBCCC, 580095005."""
    parts = [int(p) for p in version.split(".")] + [0, 0]
    return parts[0] * 1_000_000 + parts[1] * 1000 + parts[2]


def _pro6000(id: int, machine_id: int, dph: float, note: str, **facts: Any) -> Offer:
    facts.setdefault("gpu_name", "RTX PRO 6000 WS")
    return Offer(id, machine_id, gpu_ram_mb=97_887, compute_cap=1200, dph_base_usd=dph, note=note, **facts)


def _several(
    id: int, machine_id: int, gpus: int, name: str, memory_mb: int, cap: int, dph: float, note: str, **facts: Any
) -> Offer:
    """A big machine, whole: the price is for all its cards."""
    whole = {"cpu_ram_mb": 1_031_000, "cpu_cores": 128, "cpu_cores_effective": 128.0, "disk_gb": 7000.0}
    links = {"inet_down_mbps": 4200.0, "inet_up_mbps": 2900.0}
    return Offer(id, machine_id, name, memory_mb, cap, dph, note, num_gpus=gpus, **{**whole, **links, **facts})


def _rehearsal(id: int, machine_id: int, dph: float, note: str, **facts: Any) -> Offer:
    return Offer(
        id,
        machine_id,
        "Rehearsal CPU",
        8000,
        0,
        dph,
        note,
        inet_up_mbps=2000.0,
        inet_down_mbps=3000.0,
        disk_gb=200.0,
        reliability=0.995,
        cpu_ram_mb=32_000,
        cpu_cores=8,
        cpu_cores_effective=8.0,
        gpu_max_power_w=65,
        gpu_mem_bw_gbs=40.0,
        total_tflops=0.5,
        **facts,
    )


OFFERS: tuple[Offer, ...] = (
    _pro6000(24001001, 35101, 1.0753, "good"),
    _pro6000(24001002, 35102, 0.9950, "good, dear bandwidth: $0.03/GB", inet_cost_usd_gb=0.03, geolocation="Paris, FR"),
    _pro6000(24001003, 35103, 1.1400, "good, free bandwidth", inet_cost_usd_gb=0.0, geolocation="Helsinki, FI"),
    _pro6000(24001004, 35104, 0.9100, "good, other continent", geolocation="California, US", gpu_name="RTX PRO 6000 S"),
    _pro6000(24001005, 35105, 0.9300, "place unknown", geolocation=None, cpu_cores=None),
    _pro6000(24001006, 35106, 0.7900, "driver too old", cuda_max_good=12.8, driver_version="570.172.08"),
    _pro6000(24001007, 35107, 0.8200, "unreliable", reliability=0.90),
    _pro6000(24001008, 35108, 0.8500, "slow uplink", inet_up_mbps=61.0),
    _pro6000(24001009, 35109, 0.8600, "small disk", disk_gb=120.0),
    _pro6000(24001010, 35110, 2.1000, "overpriced", geolocation="Amsterdam, NL"),
    _pro6000(24001011, 35111, 0.8800, "unverified", verification="unverified"),
    _pro6000(24001012, 35112, 0.8900, "offer ends in three hours", duration_s=10_800.0),
    Offer(24001013, 35113, "H100 NVL", 95_830, 900, 1.0900, "same VRAM band, other architecture"),
    Offer(24001014, 35114, "GH200", 97_871, 900, 1.0500, "same VRAM band, arm64", cpu_arch="arm64"),
    Offer(24001015, 35115, "H200", 143_771, 900, 2.3000, "tier h200", geolocation="Frankfurt, DE"),
    Offer(24001016, 35116, "H200 NVL", 143_771, 900, 2.1500, "tier h200, other name", geolocation="Texas, US"),
    Offer(24001017, 35117, "B200", 183_359, 1000, 3.4000, "tier b200", geolocation="Stockholm, SE"),
    _several(24001018, 35118, 4, "H100 SXM", 81_559, 900, 8.9000, "four cards of 80 GB"),
    _several(24001019, 35119, 4, "H100 PCIE", 81_559, 900, 8.2000, "four cards of 80 GB, no links among them"),
    _several(24001020, 35120, 2, "H100 SXM", 81_559, 900, 4.3000, "two of them"),
    _several(24001021, 35121, 8, "H100 SXM", 81_559, 900, 17.600, "eight of them"),
    _several(24001022, 35122, 4, "A100 SXM4", 81_920, 800, 4.4000, "four cards of 80 GB, older", pcie_bw_gbs=25.4),
    _several(24001023, 35123, 2, "H200", 143_771, 900, 4.7000, "two cards of 141 GB"),
    _several(24001024, 35124, 1, "H100 SXM", 81_559, 900, 2.2000, "one card, 258 GB", cpu_cores_effective=32.0),
    _several(24001025, 35125, 1, "H100 SXM", 81_559, 900, 1.9500, "one card, 129 GB", cpu_cores_effective=16.0),
    _several(
        24001026,
        35126,
        1,
        "H100 SXM",
        81_559,
        900,
        2.0500,
        "one card, slow bus",
        cpu_cores_effective=32.0,
        pcie_bw_gbs=12.3,
    ),
    Offer(24001027, 35127, "RTX 5090", 32_607, 1200, 0.4400, "32 GB", geolocation="Warsaw, PL"),
    Offer(24001028, 35128, "L40S", 46_068, 890, 0.5500, "48 GB", geolocation="Texas, US", pcie_bw_gbs=25.1),
    Offer(24001029, 35129, "RTX 4090", 24_564, 890, 0.3100, "24 GB", pcie_bw_gbs=24.6),
    _rehearsal(24002001, 36001, 0.30, "cheapest: the box that faults hit by default"),
    _rehearsal(24002002, 36002, 0.36, "second", geolocation="Warsaw, PL"),
    _rehearsal(24002003, 36003, 0.45, "third", geolocation="Amsterdam, NL"),
    _rehearsal(24002005, 36005, 0.70, "two cards", num_gpus=2),
    _rehearsal(24002004, 36004, 0.60, "fourth", geolocation="Helsinki, FI"),
)
