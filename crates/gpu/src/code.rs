//! The code and checksums of many stripes in one launch: encode, decode, verify, CRC32C of blocks.
//!
//! A pass is prepared once, which copies tables of pointers and coefficients to the GPU. It may run any
//! number of times, each time on the current content of the strips.

use crate::device::{DeviceMemory, Gpu};
use crate::driver::Function;
use crate::error::GpuError;
use crate::tables;
use penstock_base::{BLOCK_BYTES, ZERO_BLOCK_CRC};
use penstock_raid::Code;
use std::ffi::CString;
use std::marker::PhantomData;

/// Bytes of a strip that one thread processes.
const COLUMN_BYTES: usize = 16;

/// Threads of a thread block.
const THREADS: u32 = 256;

/// Maximum number of outputs of a kernel: as many as the registers hold without spilling.
const GROUP_ROWS: usize = 4;

/// Maximum height of a grid, in thread blocks, that CUDA allows.
const MAX_UP: usize = 65_535;

/// Stripes in device memory, one after the other, each with its strips in order of their positions.
#[derive(Clone, Copy, Debug)]
pub struct Stripes<'a> {
    memory: &'a DeviceMemory,
    strips: usize,
    strip_bytes: usize,
    count: usize,
}

impl<'a> Stripes<'a> {
    /// As many stripes of `strips` strips as fit the memory.
    ///
    /// Returns [`GpuError::Shape`] unless there is a strip and `strip_bytes` is a positive multiple of 16.
    pub fn new(memory: &'a DeviceMemory, strips: usize, strip_bytes: usize) -> Result<Self, GpuError> {
        if strips == 0 || strip_bytes == 0 || !strip_bytes.is_multiple_of(COLUMN_BYTES) {
            let why = format!(
                "{strips} strips of {strip_bytes} bytes: strips are whole multiples of {COLUMN_BYTES}"
            );
            return Err(GpuError::Shape(why));
        }
        let count = strips.checked_mul(strip_bytes).map_or(0, |stripe| memory.len() / stripe);
        Ok(Self { memory, strips, strip_bytes, count })
    }

    /// The number of stripes.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The offset in the memory, in bytes, of the strip at `position` of stripe number `stripe`.
    pub fn offset(&self, stripe: usize, position: usize) -> usize {
        assert!(stripe < self.count && position < self.strips, "strip {position} of stripe {stripe}");
        (stripe * self.strips + position) * self.strip_bytes
    }

    /// Copies a table of strip addresses to the GPU, stripe by stripe, with 0 for `absent` positions. Returns
    /// it with the number of addresses for each stripe.
    fn table(&self, positions: &[usize], absent: &[usize]) -> Result<(DeviceMemory, usize), GpuError> {
        let strips = (0..self.count).flat_map(|stripe| positions.iter().map(move |at| (stripe, *at)));
        let address = |(stripe, at): (usize, usize)| match absent.contains(&at) {
            true => 0,
            false => self.memory.address() + self.offset(stripe, at) as u64,
        };
        let table = self.memory.gpu().words(strips.map(|strip| address(strip).to_le_bytes()))?;
        Ok((table, positions.len()))
    }
}

/// One kernel over all stripes.
#[derive(Debug)]
struct Launch {
    function: Function,
    /// Tables of strip addresses in the order of the kernel's parameters, with the number of addresses for
    /// each stripe: sources, parity that is read beside them, strips that are made or compared.
    strips: Vec<(DeviceMemory, usize)>,
    products: Option<DeviceMemory>,
}

/// A prepared pass. It borrows the memory that it works on.
#[derive(Debug)]
pub struct Pass<'a> {
    gpu: Gpu,
    launches: Vec<Launch>,
    stripes: usize,
    columns: u64,
    k: u32,
    /// Receives the result of a comparison: a word for each stripe and group.
    disagreements: Option<DeviceMemory>,
    memory: PhantomData<&'a DeviceMemory>,
}

/// A prepared comparison of parity.
#[derive(Debug)]
pub struct Verification<'a>(Pass<'a>);

/// A code on a GPU.
#[derive(Clone, Debug)]
pub struct GpuCode {
    gpu: Gpu,
    code: Code,
}

impl GpuCode {
    /// The code, on this GPU.
    pub fn new(gpu: &Gpu, code: &Code) -> Self {
        Self { gpu: gpu.clone(), code: code.clone() }
    }

    /// Prepares a pass that makes the parity strips of all stripes.
    pub fn encode<'a>(&self, stripes: &Stripes<'a>) -> Result<Pass<'a>, GpuError> {
        let (data, parity) = self.positions();
        self.pass(stripes, &data, &parity, |row, column| self.code.coefficient(row, column), "encode")
    }

    /// Prepares a pass that makes the strips at the positions `lost` of all stripes from k of the others.
    pub fn decode<'a>(&self, stripes: &Stripes<'a>, lost: &[usize]) -> Result<Pass<'a>, GpuError> {
        self.check(stripes)?;
        let plan = self.code.plan(lost)?;
        if self.solves(lost) {
            let (data, parity) = self.positions();
            let (k, e) = (data.len(), lost.len());
            // The coefficients of the first e parity strips, which are the last sources, in each lost strip.
            let inverse = tables::products(e, e, |row, column| plan.coefficient(row, k - e + column));
            let name = CString::new(format!("solve_powers_{e}")).expect("a name without zeros");
            let launch = Launch {
                function: self.gpu.function(&name)?,
                strips: vec![
                    stripes.table(&data, lost)?,
                    stripes.table(&parity[..e], &[])?,
                    stripes.table(lost, &[])?,
                ],
                products: Some(self.gpu.words(inverse.into_iter().map(u32::to_le_bytes))?),
            };
            return Ok(self.of_launches(stripes, k, vec![launch]));
        }
        self.pass(stripes, plan.sources(), lost, |row, column| plan.coefficient(row, column), "encode")
    }

    /// Prepares a comparison of the parity strips of all stripes with the parity of their data.
    pub fn verify<'a>(&self, stripes: &Stripes<'a>) -> Result<Verification<'a>, GpuError> {
        let (data, parity) = self.positions();
        let cell = |row, column| self.code.coefficient(row, column);
        let mut pass = self.pass(stripes, &data, &parity, cell, "verify")?;
        pass.disagreements = Some(self.gpu.zeroed(4 * stripes.count * pass.launches.len())?);
        Ok(Verification(pass))
    }

    /// True if the solving kernels can make the lost strips: two or three data strips of P+Q or P+Q+R.
    fn solves(&self, lost: &[usize]) -> bool {
        let (k, m) = (self.code.k(), self.code.m());
        let powers = tables::are_powers(m, k, |row, column| self.code.coefficient(row, column));
        powers && (2..=3).contains(&lost.len()) && lost.iter().all(|position| *position < k)
    }

    fn positions(&self) -> (Vec<usize>, Vec<usize>) {
        let (k, m) = (self.code.k(), self.code.m());
        ((0..k).collect(), (k..k + m).collect())
    }

    fn pass<'a>(
        &self,
        stripes: &Stripes<'a>,
        sources: &[usize],
        others: &[usize],
        cell: impl Fn(usize, usize) -> u8,
        what: &str,
    ) -> Result<Pass<'a>, GpuError> {
        self.check(stripes)?;
        let k = sources.len();
        let mut launches = Vec::new();
        for (group, others) in others.chunks(GROUP_ROWS).enumerate() {
            let rows = others.len();
            let cell = |row: usize, column: usize| cell(group * GROUP_ROWS + row, column);
            // The kernels with Horner's rule make at most three rows.
            let powers = rows < GROUP_ROWS && tables::are_powers(rows, k, cell);
            let name = format!("{what}_{}_{rows}", if powers { "powers" } else { "products" });
            let name = CString::new(name).expect("a name without zeros");
            let products = tables::products(rows, k, cell).into_iter().map(u32::to_le_bytes);
            launches.push(Launch {
                function: self.gpu.function(&name)?,
                strips: vec![stripes.table(sources, &[])?, stripes.table(others, &[])?],
                products: if powers { None } else { Some(self.gpu.words(products)?) },
            });
        }
        Ok(self.of_launches(stripes, k, launches))
    }

    /// Rejects stripes with a wrong number of strips, and stripes in the memory of another GPU.
    fn check(&self, stripes: &Stripes<'_>) -> Result<(), GpuError> {
        let (strips, wanted) = (stripes.strips, self.code.k() + self.code.m());
        if strips != wanted {
            return Err(GpuError::Shape(format!("stripes of {strips} strips for a code of {wanted}")));
        }
        match stripes.memory.gpu().is_same(&self.gpu) {
            true => Ok(()),
            false => Err(GpuError::Shape("the stripes are in the memory of another GPU".into())),
        }
    }

    fn of_launches<'a>(&self, stripes: &Stripes<'a>, k: usize, launches: Vec<Launch>) -> Pass<'a> {
        Pass {
            gpu: self.gpu.clone(),
            launches,
            stripes: stripes.count,
            columns: (stripes.strip_bytes / COLUMN_BYTES) as u64,
            k: k as u32,
            disagreements: None,
            memory: PhantomData,
        }
    }
}

impl Pass<'_> {
    /// Starts the pass. The strips that it makes may be read after [`Gpu::wait`].
    pub fn run(&self) -> Result<(), GpuError> {
        let across = u32::try_from(self.columns.div_ceil(u64::from(THREADS)))
            .map_err(|_| GpuError::Shape("strips are too long for one launch".into()))?;
        for (group, launch) in self.launches.iter().enumerate() {
            for first in (0..self.stripes).step_by(MAX_UP) {
                let up = (self.stripes - first).min(MAX_UP) as u32;
                let at = |(table, each): &(DeviceMemory, usize)| table.address() + (8 * each * first) as u64;
                let mut parameters: Vec<u64> = launch.strips.iter().map(at).collect();
                parameters.extend(launch.products.as_ref().map(DeviceMemory::address));
                let words = self.disagreements.as_ref();
                parameters
                    .extend(words.map(|words| words.address() + 4 * (group * self.stripes + first) as u64));
                parameters.extend([u64::from(self.k), self.columns]);
                self.gpu.launch(launch.function, [across, up], THREADS, &parameters)?;
            }
        }
        Ok(())
    }
}

impl Verification<'_> {
    /// Clears the previous result and starts the comparison.
    pub fn run(&self) -> Result<(), GpuError> {
        self.words().clear()?;
        self.0.run()
    }

    /// Waits for the comparison. Returns for each stripe the set of parity strips that disagree: bit r for
    /// parity strip r.
    pub fn disagreements(&self) -> Result<Vec<u32>, GpuError> {
        let mut bytes = vec![0; self.words().len()];
        self.words().read(0, &mut bytes)?;
        let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let of = |stripe: usize| {
            let groups = (0..self.0.launches.len())
                .map(|group| words[group * self.0.stripes + stripe] << (GROUP_ROWS * group));
            groups.fold(0, |all, group| all | group)
        };
        Ok((0..self.0.stripes).map(of).collect())
    }

    fn words(&self) -> &DeviceMemory {
        self.0.disagreements.as_ref().expect("a verification has its words")
    }
}

/// A prepared computation of the CRC32C of every 4 KiB block of all strips.
#[derive(Debug)]
pub struct Checks<'a> {
    gpu: Gpu,
    function: Function,
    strips: DeviceMemory,
    count: usize,
    blocks_per_strip: usize,
    tables: DeviceMemory,
    crcs: DeviceMemory,
    memory: PhantomData<&'a DeviceMemory>,
}

/// Prepares the checksums of all strips. Returns [`GpuError::Shape`] unless strips are a whole number of
/// blocks.
pub fn checksums<'a>(stripes: &Stripes<'a>) -> Result<Checks<'a>, GpuError> {
    if !stripes.strip_bytes.is_multiple_of(BLOCK_BYTES) {
        return Err(GpuError::Shape(format!("strips of {} bytes are not whole blocks", stripes.strip_bytes)));
    }
    let gpu = stripes.memory.gpu();
    let (count, blocks_per_strip) = (stripes.count * stripes.strips, stripes.strip_bytes / BLOCK_BYTES);
    let positions: Vec<usize> = (0..stripes.strips).collect();
    let tables = tables::checksums();
    Ok(Checks {
        gpu: gpu.clone(),
        function: gpu.function(c"crc32c_blocks")?,
        strips: stripes.table(&positions, &[])?.0,
        count,
        blocks_per_strip,
        tables: gpu.words(tables.into_iter().map(u32::to_le_bytes))?,
        crcs: gpu.zeroed(4 * count * blocks_per_strip)?,
        memory: PhantomData,
    })
}

impl Checks<'_> {
    /// Starts the computation.
    pub fn run(&self) -> Result<(), GpuError> {
        let across = self.blocks_per_strip.div_ceil(THREADS as usize / tables::WARP) as u32;
        let lanes = self.tables.address() + 4 * 1024;
        for first in (0..self.count).step_by(MAX_UP) {
            let up = (self.count - first).min(MAX_UP) as u32;
            let parameters = [
                self.strips.address() + 8 * first as u64,
                self.crcs.address() + (4 * first * self.blocks_per_strip) as u64,
                self.tables.address(),
                lanes,
                ZERO_BLOCK_CRC.into(),
                self.blocks_per_strip as u64,
            ];
            self.gpu.launch(self.function, [across, up], THREADS, &parameters)?;
        }
        Ok(())
    }

    /// Waits for the computation, and returns the checksums of all blocks, strip by strip.
    pub fn crcs(&self) -> Result<Vec<u32>, GpuError> {
        let mut bytes = vec![0; self.crcs.len()];
        self.crcs.read(0, &mut bytes)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }
}
